"""`d3serve submit`: many jobs from a file, results into another, and on from where it stopped."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from rich.console import Console

from d3serve.api.app import create_app
from d3serve.client import Client, protocol
from d3serve.commands import result_file, submit
from d3serve.commands.result_file import ResultFile
from d3serve.commands.submit import read_lines, submit_file
from d3serve.errors import InvalidRequest, RateLimited, StorageUnavailable, Unauthorized

QUIET = Console(file=io.StringIO())
NOUL = {"type": "noul", "instructions": "x"}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(protocol, "BACKOFF_S", (0.02,))
    monkeypatch.setattr(submit, "RETRY_S", 0.02)


@pytest.fixture
def files(tmp_path):
    requests, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    lines = [{"state": f"state {i}", "questions": {"q": NOUL}} for i in range(12)]
    lines[3]["questions"] = {}
    requests.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return requests, out


@pytest.fixture
def good(files):
    """The same with nothing wrong in it."""
    files[0].write_text("".join(files[0].read_text().splitlines(keepends=True)[:3]))
    return files


def run(files, url, **options):
    options = {"at_once": 8, "console": QUIET, "api_key": None} | options
    return submit_file(*files, url=url, **options)


def rows(files):
    """The rows of the result file by line; each stands there once."""
    found = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert len({row["line"] for row in found}) == len(found)
    return {row["line"]: row for row in found}


def statuses(files):
    return {line: row["status"] for line, row in sorted(rows(files).items())}


def jobs_made(worker):
    return worker.turns._table.client.zcard(worker.turns._key("jobs", "public"))


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
    with pytest.raises(StorageUnavailable, match="Start a server with `d3serve up`"):
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


def test_what_did_not_succeed_is_said_at_the_end_and_again(files, service, take_turns):
    files[0].write_text(files[0].read_text() + '{"questions": {"q": 1, "q": 2}}\n{\n')
    for _ in range(2):
        screen = Console(file=io.StringIO(), width=40)
        with take_turns():
            assert run(files, service, console=screen) == 3
        said = screen.file.getvalue()
        assert f"3 of 14 did not succeed: {files[1]} says why (1 " in said
        assert all(f"1 {code}" in said for code in ("invalid_request", "duplicate_key", "invalid_json"))


def test_results_of_other_requests_are_not_taken_for_these(files, service, take_turns):
    with take_turns():
        run(files, service)
    files[0].write_text(files[0].read_text().replace("state 7", "state seven"))
    before = files[1].read_text()
    with pytest.raises(InvalidRequest, match="another request for line 8"):
        run(files, service)
    assert files[1].read_text() == before


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


def test_an_output_that_cannot_be_written_is_refused(files, tmp_path):
    for out in (tmp_path, tmp_path / "none" / "out.jsonl"):
        with pytest.raises(InvalidRequest, match=r"cannot (read|write)"):
            run((files[0], out), "http://127.0.0.1:9")


class Trouble:
    """Stands before an API: answers in its place while it has something to answer."""

    def __init__(self, app, answers):
        self.app, self.answers, self.told = app, answers, 0

    async def __call__(self, scope, receive, send):
        answer = None
        if scope["type"] == "http" and scope["path"] != "/healthz":
            body = await _body(receive) if scope["method"] == "POST" else b""
            receive, answer = _replay(body, receive), self.answers(scope, body)
        if answer is None:
            await self.app(scope, receive, send)
            return
        self.told += 1
        status, headers, content = answer
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


async def _body(receive):
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            return body


def _replay(body, receive):
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again():
        return waiting.pop() if waiting else await receive()

    return again


def problem(status, code):
    content = json.dumps({"code": code, "detail": "no", "error": {"field": None}}).encode()
    return status, [(b"content-type", b"application/problem+json")], content


TROUBLES = {
    "a stopped server": (500, [], b"Internal Server Error"),
    "a server's fault": problem(500, "internal_error"),
    "full": problem(503, "storage_unavailable"),
    "too many": problem(429, "rate_limited"),
    "queue full": problem(429, "queue_full"),
    "a gateway": (502, [], b"<html>"),
    "a gateway without servers": (404, [], b"default backend"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_trouble_of_the_servers_is_an_outcome(trouble, good, settings, serving, take_turns):
    counts = {}

    def first_two(scope, _):
        counts[scope["path"]] = counts.get(scope["path"], 0) + 1
        return TROUBLES[trouble] if counts[scope["path"]] <= 2 else None

    app = Trouble(create_app(settings), first_two)
    with serving(app) as url, take_turns():
        assert run(good, url) == 0
    assert app.told >= 2 + 2 * 3, "each job's own address was in trouble too"
    assert set(statuses(good).values()) == {"succeeded"}


@pytest.mark.parametrize(("trouble", "kind"), [("full", StorageUnavailable), ("too many", RateLimited)])
def test_trouble_that_lasts_ends_the_run_and_leaves_no_rows(trouble, kind, good, settings, serving):
    with (
        serving(Trouble(create_app(settings), lambda *_: TROUBLES[trouble])) as url,
        pytest.raises(kind, match="run it again to go on"),
    ):
        run(good, url, patience_s=0.3)
    assert rows(good) == {}


def test_a_line_that_breaks_the_server_does_not_keep_the_others(good, settings, serving, take_turns):
    def second(_, body):
        return TROUBLES["a server's fault"] if b"state 1" in body else None

    with serving(Trouble(create_app(settings), second)) as url, take_turns():
        assert run(good, url, patience_s=5) == 1
    assert statuses(good) == {1: "succeeded", 2: "failed", 3: "succeeded"}
    assert rows(good)[2]["error"]["code"] == "internal_error"
    with serving(create_app(settings)) as url, take_turns():
        assert run(good, url) == 0, "it is asked again"


def test_a_key_that_is_refused_ends_the_run_at_once(good, settings, serving, tmp_path):
    (tmp_path / "keys").write_text("")
    app = create_app(settings.model_copy(update={"api_keys_file": tmp_path / "keys"}))
    with serving(app) as url, pytest.raises(Unauthorized):
        run(good, url, api_key="d3k_nobody")
    assert rows(good) == {}


def end(client, worker, job, way):
    """Bring a job to an end that is no success, or out of existence."""
    match way:
        case "canceled":
            client.cancel(job.id)
        case "erased":
            client.delete(job.id)
        case "succeeded and erased":
            worker.work()
            client.delete(job.id)
        case "expired":
            assert client.wait(job.id, 30).status == "expired"
        case code:
            worker.fail(worker.claim(), code, "x")


@pytest.mark.parametrize(
    ("way", "row_kept"),
    [("canceled", True), ("canceled", False), ("erased", False), ("succeeded and erased", False), ("expired", False),
     ("max_attempts", True), ("state_lost", True), ("state_lost", False), ("device_error", True),
     ("out_of_device_memory", False), ("internal_error", True)],
)  # fmt: skip
def test_a_line_whose_job_did_not_succeed_is_asked_again(way, row_kept, good, service, worker, take_turns):
    text = json.dumps({"state": "x", "questions": {"q": NOUL}, "job": {"expires_in_s": 1}})
    good[0].write_text(text if way == "expired" else text.replace(', "job": {"expires_in_s": 1}', ""))
    (line,), made = read_lines(good[0]).values(), []
    with Client(service) as client:
        for key in (f"submit-{line.digest}", f"submit-{line.digest}-1"):  # twice in a row
            job = client.submit_body(line.body, idempotency_key=key)
            made.append(job.id)
            end(client, worker, job, way)
            if "erased" not in way and way != "state_lost":
                break
    if row_kept:
        row = {"line": 1, "request": line.digest, "id": job.id, "status": "failed", "error": {"code": way}}
        good[1].write_text(json.dumps(row) + "\n")
    with take_turns():
        assert run(good, service) == 0
    assert statuses(good) == {1: "succeeded"}
    if way == "state_lost":
        assert rows(good)[1]["id"] not in made, "a lost state is there again only if it is sent again"


def test_two_at_once_on_one_output_are_refused(good, service, take_turns):
    with ResultFile(good[1]), pytest.raises(InvalidRequest, match="another `d3serve submit` is writing"):
        run(good, service)
    with take_turns():
        assert run(good, service) == 0
        good[1].write_text(
            "".join(good[1].read_text().splitlines(keepends=True)[:2]).replace("succeeded", "failed", 1)
        )
        with ResultFile(good[1]) as held:
            held.keep(lambda row: row["status"] == "succeeded")  # in a file of its own, under the old name
            with pytest.raises(InvalidRequest, match="another `d3serve submit` is writing"):
                run(good, service)
        assert run(good, service) == 0
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


def command(files, url, *more):
    return [
        sys.executable,
        "-m",
        "d3serve",
        "submit",
        str(files[0]),
        "--out",
        str(files[1]),
        "--url",
        url,
        *more,
    ]


def until(true, timeout_s=60):
    ends = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.02)


def test_an_interrupt_says_what_is_left_and_the_next_run_finds_it(good, service, worker, take_turns):
    process = subprocess.Popen(command(good, service), stderr=subprocess.PIPE, text=True)
    until(lambda: jobs_made(worker) == 3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped: 0 of 3 have an outcome" in said
    assert "Traceback" not in said
    with take_turns():
        assert run(good, service) == 0
    assert jobs_made(worker) == 3


def test_an_interrupt_waits_for_no_file_that_cannot_be_read_yet(good, service):
    """A network drive or a name server that does not answer held the command, and a second interrupt did not help."""
    stalled = good[0].parent / "stalled.png"
    os.mkfifo(stalled)
    good[0].write_text(json.dumps({"state": "x", "images": [stalled.name], "questions": {"q": NOUL}}))
    process = subprocess.Popen(command(good, service), stderr=subprocess.PIPE, text=True)
    writer = []

    def is_being_read():
        with contextlib.suppress(OSError):  # until the other end is open
            writer.append(os.open(stalled, os.O_WRONLY | os.O_NONBLOCK))
        return writer

    try:
        until(is_being_read)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        for descriptor in writer:
            os.close(descriptor)
    assert process.returncode == 130
    assert "stopped: 0 of 1 have an outcome" in said
    assert "Traceback" not in said


def test_a_full_disk_is_one_line(good, service, take_turns):
    with take_turns():
        done = subprocess.run(
            command((good[0], "/dev/full"), service), capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    assert "cannot write /dev/full: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@contextlib.contextmanager
def api(port, redis_url):
    """`d3serve api` as a process of its own."""
    arguments = ["api", "--port", str(port), "--redis-url", redis_url]
    process = subprocess.Popen([sys.executable, "-m", "d3serve", *arguments], stderr=subprocess.DEVNULL)
    try:

        def answers():
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).is_success

        until(answers)
        yield process
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
def test_a_restart_of_the_api_changes_no_outcome(good, redis_url, worker, take_turns, monkeypatch):
    monkeypatch.setattr(protocol, "BACKOFF_S", (0.2,))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcome = []
    with api(port, redis_url):
        url = f"http://127.0.0.1:{port}"
        thread = threading.Thread(target=lambda: outcome.append(run(good, url)))
        thread.start()
        until(lambda: jobs_made(worker) == 3)
        with Client(url) as client:
            waiting = [job.id for job in client.list().jobs]
        followed = []

        def follow():
            with Client(url) as client:
                followed.append(client.wait(waiting[0]).status)

        waiter = threading.Thread(target=follow)
        waiter.start()
        time.sleep(0.5)  # so that the polls hang there
    with api(port, redis_url), take_turns():
        thread.join(60)
        waiter.join(60)
    assert outcome == [0]
    assert followed == ["succeeded"]
    assert set(statuses(good).values()) == {"succeeded"}
