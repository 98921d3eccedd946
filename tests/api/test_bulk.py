"""`d3serve submit`: many jobs from a file, results into another, and on from where it stopped."""

import io
import json

import pytest
from rich.console import Console

from d3serve.bulk import read_results, submit_file
from d3serve.client import protocol
from d3serve.errors import InvalidRequest, StorageUnavailable

QUIET = Console(file=io.StringIO())
NOUL = {"type": "noul", "instructions": "x"}


@pytest.fixture
def files(tmp_path):
    requests, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    lines = [{"state": f"state {i}", "questions": {"q": NOUL}} for i in range(12)]
    lines[3]["questions"] = {}
    requests.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return requests, out


def run(files, url, at_once=8):
    return submit_file(*files, url=url, api_key=None, at_once=at_once, console=QUIET)


def jobs_made(worker):
    return worker.turns._client.zcard(worker.turns._key("jobs", "public"))


def test_every_line_gets_its_outcome(files, service, take_turns, worker):
    with take_turns():
        assert run(files, service) == 1
    rows = read_results(files[1])
    assert sorted(rows) == list(range(1, 13))
    assert rows[4]["status"] == "refused"
    assert rows[4]["error"]["code"] == "invalid_request"
    assert all(rows[line]["result"]["answers"]["q"]["noul"] == 0.75 for line in rows if line != 4)
    assert jobs_made(worker) == 11


def test_running_again_asks_only_what_is_missing_and_makes_no_second_job(files, service, take_turns, worker):
    with take_turns():
        run(files, service)
        rows = files[1].read_text().splitlines(keepends=True)
        files[1].write_text("".join(rows[:5]) + rows[5][:20])  # a crash cut the sixth line off
        run(files, service)
    assert sorted(read_results(files[1])) == list(range(1, 13))
    assert jobs_made(worker) == 11, "a line that had its job got another"


def test_a_server_that_goes_away_stops_it_with_one_error(files, monkeypatch):
    monkeypatch.setattr(protocol, "BACKOFF_S", (0.001,))
    with pytest.raises(StorageUnavailable):
        run(files, "http://127.0.0.1:9")
    assert read_results(files[1]) == {}


@pytest.mark.parametrize(("text", "reason"), [("{}\n{", "line 2"), ("[]", "line 1"), ("\xff", "line 1")])
def test_a_bad_file_is_refused_before_anything_is_sent(text, reason, files):
    files[0].write_text(text)
    with pytest.raises(InvalidRequest, match=reason):
        run(files, "http://127.0.0.1:9")


def test_another_file_is_not_taken_for_results(files):
    files[1].write_text('{"state": 1}\n')
    with pytest.raises(InvalidRequest, match="no result of ours"):
        run(files, "http://127.0.0.1:9")


def test_a_line_that_is_no_json_for_the_server_is_an_outcome_like_any_other(files, service, take_turns):
    lines = files[0].read_text().splitlines()
    lines[0], lines[1] = '{"state": NaN, "questions": {}}', '{"state": "\\ud83d", "questions": {}}'
    files[0].write_text("\n".join(lines))
    with take_turns():
        assert run(files, service) == 3
    rows = read_results(files[1])
    assert [rows[line]["status"] for line in (1, 2, 4, 5)] == ["refused"] * 3 + ["succeeded"]


def test_what_did_not_succeed_is_said_at_the_end_and_again(files, service, take_turns):
    for _ in range(2):
        screen = Console(file=io.StringIO(), width=40)
        with take_turns():
            submit_file(*files, url=service, api_key=None, at_once=8, console=screen)
        assert f"1 of 12 did not succeed: {files[1]} says why" in screen.file.getvalue()


def test_results_of_other_requests_are_not_taken_for_these(files, service, take_turns):
    with take_turns():
        run(files, service)
    files[0].write_text(files[0].read_text().replace("state 7", "state seven"))
    with pytest.raises(InvalidRequest, match="another request for line 8"):
        run(files, service)


def test_a_line_separator_inside_a_text_does_not_end_a_line(files, service, take_turns):
    row = {"state": "one\u2028two", "questions": {"q": NOUL}}
    files[0].write_text(json.dumps(row, ensure_ascii=False) + "\n")
    with take_turns():
        assert run(files, service) == 0


def test_an_output_that_cannot_be_written_is_refused(files, tmp_path):
    for out in (tmp_path, tmp_path / "none" / "out.jsonl"):
        with pytest.raises(InvalidRequest, match=r"cannot (read|write)"):
            run((files[0], out), "http://127.0.0.1:9")
