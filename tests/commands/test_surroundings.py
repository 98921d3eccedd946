"""Variables that libraries read paths from lead where they led at the start, and empty ones lead nowhere."""

from pathlib import Path

import pytest

from d3serve.commands.surroundings import LIBRARY_PATHS, LISTS_OF_PATHS, tidy_environment


@pytest.mark.parametrize("name", LIBRARY_PATHS)
def test_a_path_of_a_library_leads_where_it_led(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, kept in [("a:b", f"{tmp_path}/a:b"), ("~/a", "~/a"), ("/a", "/a")]:
        environment = {name: given, "OTHER": ""}
        tidy_environment(environment)
        assert environment == {name: kept, "OTHER": ""}
    empty = {name: ""}
    tidy_environment(empty)
    assert empty == {}


@pytest.mark.parametrize("name", LISTS_OF_PATHS)
def test_an_empty_part_of_a_list_is_not_the_current_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, kept in [(":a::/b:", {name: f"{tmp_path}/a:/b"}), (":", {}), ("", {})]:
        environment = {name: given}
        tidy_environment(environment)
        assert environment == kept


def test_nothing_is_needed_of_a_current_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    environment = {"HF_HOME": "a", "TMPDIR": "/b", "SSL_CERT_FILE": ""}
    tidy_environment(environment)
    assert environment == {"HF_HOME": "a", "TMPDIR": "/b"}
