"""A name becomes a folder: pinned commits, only the files that are read, refusals that say what to do."""

import os
import shutil
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from d3serve.errors import InvalidCheckpoint
from d3serve.model import hub
from d3serve.model.config import ATTENTION_MODES
from d3serve.model.registry import PUBLISHED, find

COMMIT = "689b3af1" + "0" * 32


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """A Hub whose repositories have one commit; records what is downloaded."""
    asked = []

    def download(model, *, revision, allow_patterns):
        asked.append((model, revision, allow_patterns))
        folder = tmp_path / "snapshots" / (revision or "f" * 40)
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)

    commits = [SimpleNamespace(commit_id="a" * 40), SimpleNamespace(commit_id=COMMIT)]
    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub.HfApi, "list_repo_commits", lambda _self, _model: commits)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return asked


def test_a_folder_is_itself(tiny_checkpoint):
    found = hub.locate(str(tiny_checkpoint))
    assert (found.folder, found.name, found.revision) == (tiny_checkpoint, "tiny", None)


@pytest.fixture
def identity_after(tmp_path, tiny_checkpoint):
    """The identity of a package called `ck` once `change` has had its way with the folder."""

    def after(change, revision=None):
        folder = tmp_path / "ck"
        shutil.copytree(tiny_checkpoint, folder)
        change(folder)
        identity = hub.locate(str(folder), revision).identity
        shutil.rmtree(folder)
        return identity

    return after


def poke(name):
    """Change the last byte of a file: of weights, the last number of the last tensor."""

    def change(folder):
        with (folder / name).open("r+b") as file:
            file.seek(-1, 2)
            byte = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([byte ^ 1]))

    return change


@pytest.mark.parametrize("name", ["model.safetensors", "readout.safetensors", "config.json"])
@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_folder_of_one_name_with_other_weights_is_another_model(identity_after, name, revision):
    assert identity_after(poke(name), revision) != identity_after(lambda _: None, revision)


def test_the_same_files_are_the_same_model_wherever_they_lie(identity_after, tiny_checkpoint):
    assert identity_after(lambda _: None) == hub.locate(str(tiny_checkpoint)).identity
    assert identity_after(lambda _: None, "v1") != identity_after(lambda _: None, "v2")


def test_a_large_file_is_known_by_pieces_all_over_it(identity_after, monkeypatch):
    monkeypatch.setattr(hub, "WHOLE_BYTES", 2**16)
    monkeypatch.setattr(hub, "SAMPLE_BYTES", 64)
    times = {"model.safetensors": (0, 0)}

    def at_one_time(change):
        def changed(folder):
            change(folder)
            for name, ns in times.items():
                os.utime(folder / name, ns=ns)

        return changed

    untouched = identity_after(at_one_time(lambda _: None))
    assert identity_after(at_one_time(lambda _: None)) == untouched
    assert identity_after(at_one_time(poke("model.safetensors"))) != untouched
    times["model.safetensors"] = (0, 1)
    assert identity_after(at_one_time(lambda _: None)) != untouched


@pytest.mark.usefixtures("no_network")
def test_without_a_home_a_download_needs_a_place(monkeypatch):
    monkeypatch.setattr(
        constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub"
    )  # what the library makes of no home
    with pytest.raises(InvalidCheckpoint, match="set HF_HOME"):
        hub.locate("vllm-sr/d3-turbo")


@pytest.mark.usefixtures("no_network")
def test_a_name_too_long_for_a_file_is_no_folder():
    assert hub.locate("x" * 300).name == "x" * 300


def test_an_abbreviated_pin_is_completed_from_the_history(no_network):
    found = hub.locate("vllm-sr/d3-turbo")
    assert found.revision == COMMIT
    assert no_network == [("vllm-sr/d3-turbo", COMMIT, ["*.safetensors", "*.json", "*.jinja"])]


def test_an_abbreviated_pin_is_completed_from_the_cache_when_offline(no_network, tmp_path, monkeypatch):
    (tmp_path / "cache" / "models--vllm-sr--d3-turbo" / "snapshots" / COMMIT).mkdir(parents=True)
    monkeypatch.setattr(hub.HfApi, "list_repo_commits", lambda *_: pytest.fail("asked the Hub"))
    assert hub.locate("vllm-sr/d3-turbo").revision == COMMIT
    assert len(no_network) == 1


def test_a_revision_that_the_user_names_wins(no_network):
    hub.locate("vllm-sr/d3-turbo", "main")
    hub.locate("someone/else", None)
    assert [asked[1] for asked in no_network] == ["main", None]


def test_code_is_fetched_only_on_request(no_network):
    hub.locate("vllm-sr/d3-turbo", with_code=True)
    assert no_network[0][2][-1] == "d3_format.py"


def test_a_pin_that_is_gone_says_so(no_network):
    with pytest.raises(InvalidCheckpoint, match="has no commit cbff3a3c in its history; pass --revision"):
        hub.locate("vllm-sr/d3")
    assert no_network == []


@pytest.mark.parametrize(
    ("model", "reason"),
    [("vllm-sr/d3-ultra", "no public description"), ("vllm-sr/d3-ultra-NVFP4", "Blackwell")],
)
def test_what_cannot_be_served_is_refused_before_it_is_downloaded(model, reason, no_network):
    with pytest.raises(InvalidCheckpoint, match=reason):
        hub.locate(model)
    assert no_network == []


def test_a_layout_of_its_own_is_downloaded_with_its_code_on_request(no_network):
    hub.locate("vllm-sr/d3-ultra", "main", with_code=True)
    assert no_network[0][2][-1] == "d3_format.py"


RESPONSE = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
FAULTS = [
    (GatedRepoError("gated", response=RESPONSE), "accept its terms at https://huggingface.co/a/b"),
    (RevisionNotFoundError("none", response=RESPONSE), "has no revision v9; pass --revision"),
    (RepositoryNotFoundError("none", response=RESPONSE), "no such repository"),
    (LocalEntryNotFoundError("none"), "check its name and the network"),
    (OfflineModeIsEnabled("offline"), "check its name"),
    (httpx.ConnectError("refused"), "the Hub cannot be reached: check its name"),
    (httpx.ReadTimeout("slow"), "the Hub cannot be reached"),
    (OSError("disk full\nmore"), "cannot be downloaded: disk full"),
    (OSError(), "cannot be downloaded: OSError"),
]


@pytest.mark.parametrize("step", ["snapshot_download", "HfApi.list_repo_commits"])
@pytest.mark.parametrize(("fault", "advice"), FAULTS, ids=lambda each: type(each).__name__)
def test_what_goes_wrong_comes_with_advice(fault, advice, step, monkeypatch):
    """At either step: an abbreviated commit is looked up before anything is downloaded."""

    def broken(*_args, **_kwargs):
        raise fault

    monkeypatch.setattr(f"d3serve.model.hub.{step}", broken)
    revision = "v9" if step == "snapshot_download" else "0123abcd"
    with pytest.raises(InvalidCheckpoint) as refused:
        hub.locate("a/b", revision)
    advice = advice.replace("v9", revision)
    assert advice in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("name", ["./missing", "/missing", "~/missing/d3", "a/b/c", "no spaces/here"])
def test_a_name_that_is_neither(name):
    with pytest.raises(InvalidCheckpoint):
        hub.locate(name)


def test_the_registry_is_consistent():
    assert len({each.repository for each in PUBLISHED}) == len(PUBLISHED)
    assert all(each.attention_mode in ATTENTION_MODES for each in PUBLISHED)
    assert find("vllm-sr/d3-turbo").validated_length == 32_768
    assert find("vllm-sr/unknown") is None
