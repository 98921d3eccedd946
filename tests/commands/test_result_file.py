"""The file that `d3serve submit` writes: nobody else's is touched, two runs never share one, a full disk is told."""

import os
import subprocess

import pytest
from submissions import command, rows, run, statuses

from d3serve.commands import result_file
from d3serve.commands.result_file import ResultFile
from d3serve.errors import InvalidRequest

OTHER_FILES = [
    '{"state": 1}\n', '{"state": 1}', '{"line": 1}\n', '{"line": "1", "request": "", "status": ""}\n',
    "[" * 100_000 + "\n", "\n", "PK\x03",
]  # fmt: skip


@pytest.mark.parametrize("text", OTHER_FILES, ids=lambda text: text[:9])
def test_another_file_is_not_taken_for_results_and_stays_as_it_is(text, files):
    files[1].write_text(text)
    with pytest.raises(InvalidRequest, match="no result of ours"):
        run(files, "http://127.0.0.1:9")
    assert files[1].read_text() == text


def test_the_request_file_is_not_taken_for_results(good):
    before = good[0].read_text()
    for text in (before, before.rstrip("\n"), before.splitlines()[0]):
        good[0].write_text(text)
        with pytest.raises(InvalidRequest, match="no result of ours"):
            run((good[0], good[0]), "http://127.0.0.1:9")
        assert good[0].read_text() == text


def test_an_output_that_cannot_be_written_is_refused(files, tmp_path):
    for out in (tmp_path, tmp_path / "none" / "out.jsonl"):
        with pytest.raises(InvalidRequest, match=r"cannot (read|write)"):
            run((files[0], out), "http://127.0.0.1:9")


def test_two_at_once_on_one_output_are_refused(good, service, take_turns):
    with ResultFile(good[1]), pytest.raises(InvalidRequest, match="another `d3serve submit` is writing"):
        run(good, service)
    with take_turns():
        assert run(good, service) == 0
        good[1].write_text(
            "".join(good[1].read_text().splitlines(keepends=True)[:2]).replace("succeeded", "failed", 1)
        )
        with ResultFile(good[1]) as held:
            held.rewrite(
                [(key, row.number) for key, row in held.entries.items() if not row.code]
            )  # in a new file
            with pytest.raises(InvalidRequest, match="another `d3serve submit` is writing"):
                run(good, service)
        assert run(good, service, retry_failed=True) == 0
    assert set(statuses(good).values()) == {"succeeded"}


def test_what_a_full_disk_cuts_off_does_not_stay(good, service, take_turns, monkeypatch):
    written, real = [], os.write

    def write(descriptor, data):
        if len(written) == 1:
            real(descriptor, bytes(data)[:10])
            raise OSError(28, "No space left on device")
        written.append(real(descriptor, data))
        return written[-1]

    monkeypatch.setattr(result_file.os, "write", write)
    with (
        take_turns(),
        pytest.raises(InvalidRequest, match=r"cannot write .*out.jsonl: No space left on device"),
    ):
        run(good, service, at_once=1)
    monkeypatch.undo()
    assert len(rows(good)) == 1, "a whole row, and nothing of the next"
    with take_turns():
        assert run(good, service) == 0


def test_a_full_disk_is_one_line(good, service, take_turns):
    with take_turns():
        done = subprocess.run(
            command((good[0], "/dev/full"), service), capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    assert "cannot write /dev/full: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
