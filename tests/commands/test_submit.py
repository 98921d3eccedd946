"""`d3serve submit`: many jobs from a file, results into another, and on from where it stopped."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from submissions import NOUL, jobs_made, rows, run, statuses

from d3serve.client import protocol
from d3serve.commands import submit_run
from d3serve.errors import InvalidRequest, StorageUnavailable


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(protocol, "BACKOFF_S", (0.02,))
    monkeypatch.setattr(submit_run, "RETRY_S", 0.02)


def test_every_line_gets_its_outcome(files, service, take_turns, worker):
    with take_turns():
        assert run(files, service) == 1
    found = rows(files)
    assert sorted(found) == list(range(1, 13))
    assert found[4]["status"] == "refused"
    assert found[4]["error"]["code"] == "invalid_request"
    assert all(found[line]["result"]["answers"]["q"]["noul"] == 0.75 for line in found if line != 4)
    assert jobs_made(worker) == 11


def test_running_again_asks_only_what_is_missing_and_makes_no_second_job(files, service, take_turns, worker):
    with take_turns():
        run(files, service)
        lines = files[1].read_text().splitlines(keepends=True)
        files[1].write_text("".join(lines[:5]) + lines[5][:20])  # a crash cut the sixth line off
        run(files, service)
    assert sorted(rows(files)) == list(range(1, 13))
    assert jobs_made(worker) == 11, "a line that had its job got another"


def test_a_server_that_is_not_there_stops_it_at_once(files):
    with pytest.raises(StorageUnavailable, match="Start a server with `d3serve up --model"):
        run(files, "http://127.0.0.1:9")
    assert rows(files) == {}


BAD_LINES = {
    b'{"state": "x", "questions": {"q": 1, "q": 2}}': "duplicate_key",
    b'{"state": "x", "state": "y"}': "duplicate_key",
    b'{"state": ' + b"[" * 5000 + b"]" * 5000 + b"}": "invalid_json",
    b'{"state": ' + b"[" * 990 + b"]" * 990 + b"}": "invalid_json",
    b'{"state": NaN}': "invalid_json",
    b'{"state": 1e999}': "invalid_json",
    b'{"state": -Infinity}': "invalid_json",
    b'{"state": ' + b"9" * 5000 + b"}": "invalid_json",
    b'{"state": "\\ud83d"}': "invalid_json",
    b'{"state": "\xff"}': "invalid_json",
    b'\xef\xbb\xbf{"state": "x"}': "invalid_json",
    b'{"state": "x"': "invalid_json",
    b"[]": "invalid_json",
    b"null": "invalid_json",
    b"state,questions": "invalid_json",
}


def test_a_line_that_is_no_strict_json_is_refused_by_its_number_and_the_others_are_sent(
    good, service, take_turns
):
    lines = [line for bad in BAD_LINES for line in (bad, good[0].read_bytes().splitlines()[0])]
    good[0].write_bytes(b"\r\n".join(lines))
    with take_turns():
        assert run(good, service) == len(BAD_LINES)
    for number, (text, code) in enumerate(BAD_LINES.items()):
        row = rows(good)[2 * number + 1]
        assert (row["status"], row["error"]["code"]) == ("refused", code), text[:40]
        assert f"{good[0]} line {2 * number + 1}: " in row["error"]["message"]
        assert rows(good)[2 * number + 2]["status"] == "succeeded"


def test_what_did_not_succeed_is_said_at_the_end_and_again(files, service, take_turns):
    files[0].write_text(files[0].read_text() + '{"questions": {"q": 1, "q": 2}}\n{\n')
    for _ in range(2):
        screen = Console(file=io.StringIO(), width=40)
        with take_turns():
            assert run(files, service, console=screen) == 3
        said = screen.file.getvalue()
        assert f"3 of 14 did not succeed: {files[1]} says why (1 " in said
        assert all(f"1 {code}" in said for code in ("invalid_request", "duplicate_key", "invalid_json"))


def test_a_line_that_was_refused_and_is_corrected_is_asked(files, service, take_turns):
    with take_turns():
        assert run(files, service) == 1
        files[0].write_text(
            files[0].read_text().replace('"questions": {}', json.dumps({"questions": {"q": NOUL}})[1:-1])
        )
        assert run(files, service) == 0
    assert set(statuses(files).values()) == {"succeeded"}


def test_a_line_separator_inside_a_text_does_not_end_a_line(files, service, take_turns):
    row = {"state": "one\u2028two", "questions": {"q": NOUL}}
    files[0].write_text(json.dumps(row, ensure_ascii=False) + "\n")
    with take_turns():
        assert run(files, service) == 0


def write(files, *lines):
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))


def asks(state, **more):
    return {**more, "state": state, "questions": {"q": NOUL}}


def test_a_line_that_succeeded_and_is_corrected_is_asked_and_no_other(good, service, worker, take_turns):
    with take_turns():
        run(good, service)
        good[0].write_text(good[0].read_text().replace("state 1", "state one"))
        assert run(good, service) == 0
    assert jobs_made(worker) == 4
    found = [json.loads(line) for line in good[1].read_text().splitlines()]
    assert sorted(row["line"] or 0 for row in found) == [0, 1, 2, 3], "a paid answer is kept, as of no line"


def test_with_a_custom_id_a_correction_takes_the_place_of_what_it_corrects(good, service, worker, take_turns):
    write(good, asks("one", custom_id="a"), asks("two", custom_id="b"))
    with take_turns():
        assert run(good, service) == 0
        first = rows(good)
        write(good, asks("one", custom_id="a"), asks("zwei", custom_id="b"))
        assert run(good, service) == 0
    second = rows(good)
    assert [second[line]["custom_id"] for line in (1, 2)] == ["a", "b"]
    assert second[1] == first[1]
    assert second[2]["id"] != first[2]["id"]
    assert jobs_made(worker) == 3


def test_lines_that_move_keep_their_answers_and_get_their_new_numbers(good, service, worker, take_turns):
    with take_turns():
        run(good, service)
        ids = {line: row["id"] for line, row in rows(good).items()}
        good[0].write_text(json.dumps(asks("new")) + "\n" + good[0].read_text())
        assert run(good, service) == 0
    assert {line: row["id"] for line, row in rows(good).items() if line > 1} == {
        n + 1: i for n, i in ids.items()
    }
    assert jobs_made(worker) == 4


def test_two_lines_alike_are_two_requests(good, service, worker, take_turns):
    write(good, asks("same"), asks("same"))
    with take_turns():
        for _ in range(2):
            assert run(good, service) == 0
    assert sorted(rows(good)) == [1, 2]
    assert jobs_made(worker) == 2


def test_a_custom_id_on_two_lines_is_refused_before_anything_is_sent(good, service, worker):
    write(good, asks("one", custom_id="a"), asks("two", custom_id="b"), asks("three", custom_id="a"))
    with pytest.raises(InvalidRequest, match=r'custom_id "a" is on line 1 of .* and on line 3'):
        run(good, service)
    assert jobs_made(worker) == 0


def test_what_failed_is_asked_again_on_wish_alone(files, service, worker, take_turns):
    with take_turns():
        assert run(files, service) == 1
        made, before = jobs_made(worker), files[1].read_text()
        assert run(files, service) == 1
        assert files[1].read_text() == before
        assert run(files, service, retry_failed=True) == 1
    assert jobs_made(worker) == made
    assert files[1].read_text() != before, "the line that is refused was not asked again"


def test_results_come_in_the_order_of_their_lines_on_wish(files, service, take_turns):
    lines = files[0].read_text().splitlines(keepends=True)
    with take_turns():
        run(files, service)
        files[0].write_text("".join(reversed(lines)))
        assert run(files, service, in_order=True) == 1
    found = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert [row["line"] for row in found] == sorted(row["line"] for row in found)
    assert len(found) == 12


def test_lines_without_questions_ask_those_of_the_command(good, service, take_turns):
    write(good, {"state": "one", "custom_id": "a"}, asks("two"))
    with take_turns():
        assert run(good, service, questions={"spam": NOUL}) == 0
    assert list(rows(good)[1]["result"]["answers"]) == ["spam"]
    assert list(rows(good)[2]["result"]["answers"]) == ["q"], "a line's own come first"


def test_the_speed_is_told_in_questions_and_tokens(good, service, take_turns):
    screen = Console(file=io.StringIO(), width=200)
    with take_turns():
        run(good, service, console=screen)
    assert re.search(r"3 lines in [\d.]+ s: [\d.,]+ questions/s, [\d,]+ tokens/s", screen.file.getvalue())


def test_a_program_is_told_how_the_lines_ended(files, service, take_turns, capsys):
    def printed():  # beside the log of the API, which runs in this process
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        return json.loads(line)

    with take_turns():
        assert run(files, service, as_json=True) == 1
    told = printed()
    assert told.pop("seconds") > 0
    assert told == {"lines": 12, "succeeded": 11, "errors": {"invalid_request": 1}, "asked": 12}
    run(files, service, as_json=True)
    assert printed()["asked"] == 0


def test_the_outcome_does_not_mix_with_the_results(files, service):
    with pytest.raises(InvalidRequest, match="--json needs an --out that is a file"):
        run((files[0], Path("-")), service, as_json=True)
