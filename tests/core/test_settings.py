"""One rule for all settings: empty is unset, blank is refused, a path leads where it led at the start."""

from pathlib import Path
from typing import get_args

import pytest

from d3serve.errors import InvalidSettings
from d3serve.settings import GONE, PREFIX, Settings

FIELDS = Settings.model_fields
PATHS = [name for name, field in FIELDS.items() if Path in (field.annotation, *get_args(field.annotation))]


def variable(name: str) -> str:
    return PREFIX + name.upper()


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "api_keys_file"])
def test_an_empty_variable_is_as_good_as_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), "")
    assert getattr(Settings.load(), name) == FIELDS[name].get_default(call_default_factory=True)


@pytest.mark.parametrize("spelling", ["D3SERVE_API_KEYS_FILE", "d3serve_api_keys_file"])
def test_an_empty_key_file_does_not_open_the_door(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(spelling, "")
    with pytest.raises(InvalidSettings, match="D3SERVE_API_KEYS_FILE is empty"):
        Settings.load()


@pytest.mark.parametrize("name", FIELDS)
def test_a_blank_value_is_refused_whoever_gives_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSettings, match=variable(name)):
        Settings.load(**{name: ""})
    monkeypatch.setenv(variable(name), " ")
    with pytest.raises(InvalidSettings, match=variable(name)):
        Settings.load()


@pytest.mark.parametrize("name", PATHS)
def test_a_relative_path_leads_to_the_folder_of_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert getattr(Settings.load(**{name: "a b"}), name) == tmp_path / "a b"
    assert getattr(Settings.load(**{name: "~/a"}), name) == tmp_path / "home" / "a"


def test_a_model_in_a_folder_leads_there_too_and_a_hub_id_stays_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    for given, kept in [
        ("mine/model", str(tmp_path / "mine" / "model")),
        ("./missing", str(tmp_path / "missing")),
        ("theirs/model", "theirs/model"),
        ("x" * 300, "x" * 300),
    ]:
        assert Settings.load(model=given).model == kept


def test_without_a_home_only_what_lies_there_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "expanduser", _no_home)
    settings = Settings.load()
    assert "D3SERVE_DATA_DIR" not in settings.to_env()
    with pytest.raises(InvalidSettings, match="choose one with --data-dir"):
        settings.data_folder()
    with pytest.raises(InvalidSettings, match="D3SERVE_STATE_DIR names a home folder"):
        Settings.load(state_dir="~/states")


def _no_home(path: Path) -> Path:
    if str(path).startswith("~"):
        raise RuntimeError("Could not determine home directory.")
    return path


def test_a_path_that_no_text_can_hold_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="D3SERVE_DATA_DIR must be a path in UTF-8"):
        Settings.load(data_dir="/srv/\udcff")


def test_a_misspelt_setting_is_told_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D3SERVE_REDISURL", "redis://here")
    with pytest.raises(InvalidSettings, match="D3SERVE_REDISURL: did you mean D3SERVE_REDIS_URL"):
        Settings.load()
    monkeypatch.delenv("D3SERVE_REDISURL")
    monkeypatch.setenv("D3SERVE_XYZZY", "1")
    with pytest.raises(InvalidSettings, match="D3SERVE_XYZZY: see docs"):
        Settings.load()


@pytest.mark.parametrize("name", sorted(GONE))
def test_a_setting_of_before_is_refused_as_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name.removeprefix(PREFIX).lower() not in Settings.model_fields
    monkeypatch.setenv(name, "5")
    with pytest.raises(InvalidSettings, match=f"{name} is no setting any more"):
        Settings.load()


def test_what_kubernetes_says_of_a_service_called_d3serve_is_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for service in ("D3SERVE", "D3SERVE_API"):
        for name, value in {
            "SERVICE_HOST": "10.0.0.1",
            "SERVICE_PORT": "80",
            "SERVICE_PORT_HTTP": "80",
            "PORT": "tcp://10.0.0.1:80",
            "PORT_80_TCP": "tcp://10.0.0.1:80",
            "PORT_80_TCP_PROTO": "tcp",
            "PORT_80_TCP_PORT": "80",
            "PORT_80_TCP_ADDR": "10.0.0.1",
        }.items():
            monkeypatch.setenv(f"{service}_{name}", value)
    assert Settings.load().port == 8000
    monkeypatch.setenv("D3SERVE_PORT", "9000")
    assert Settings.load().port == 9000
    monkeypatch.setenv("D3SERVE_API_PORT", "9000")
    with pytest.raises(InvalidSettings, match="unknown setting D3SERVE_API_PORT"):
        Settings.load()
