"""`d3serve submit` and a server in trouble: no trouble is an outcome, and none keeps the other lines."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from submissions import NOUL, Trouble, jobs_made, problem, rows, run, statuses, until

from d3serve.api.app import create_app
from d3serve.client import Client, protocol
from d3serve.commands import submit_run
from d3serve.commands.request_file import RequestFile
from d3serve.commands.submit_run import RunPace
from d3serve.errors import InternalError, RateLimited, StorageUnavailable, Unauthorized


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(protocol, "BACKOFF_S", (0.02,))
    monkeypatch.setattr(submit_run, "RETRY_S", 0.02)


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


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_a_line_that_breaks_the_server_does_not_keep_the_others(at_once, good, settings, serving, take_turns):
    """Whether they are answered while it is tried, long after, or were before."""

    def second(_, body):
        return TROUBLES["a server's fault"] if b"state 1" in body else None

    with serving(Trouble(create_app(settings), second)) as url, take_turns():
        assert run(good, url, patience_s=0.1, at_once=at_once) == 1
    assert statuses(good) == {1: "succeeded", 2: "failed", 3: "succeeded"}
    assert rows(good)[2]["error"]["code"] == "internal_error"
    with serving(create_app(settings)) as url, take_turns():
        assert run(good, url) == 1, "it is not asked again by itself"
        assert run(good, url, retry_failed=True) == 0


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_server_that_breaks_down_fails_no_line_after_another(
    at_once, settings, serving, take_turns, tmp_path
):
    """Where lines are asked one by one, the first of them may be what breaks it; no other can be told from it."""
    files = tmp_path / "many.jsonl", tmp_path / "out.jsonl"
    body = {"model": "jev-latest", "questions": {"q": NOUL}}
    files[0].write_text("".join(json.dumps(body | {"state": f"state {i}"}) + "\n" for i in range(10)))
    posts = []

    def from_the_second(scope, _):
        posts.extend([scope["path"]] * (scope["method"] == "POST"))
        return TROUBLES["a server's fault"] if len(posts) > 1 else None

    with (
        serving(Trouble(create_app(settings), from_the_second)) as url,
        take_turns(),
        pytest.raises(InternalError, match="run it again to go on"),
    ):
        run(files, url, patience_s=0.1, at_once=at_once)
    assert [row["status"] for row in rows(files).values()].count("failed") == (at_once == 1)


def test_trouble_after_a_try_that_went_well_for_long_is_another(monkeypatch):
    """A server may restart twice while one job waits: what it told before the first counts no more."""
    clock = iter((100.0, 109.0, 121.0, 132.0, 143.0)).__next__  # of the failures
    monkeypatch.setattr(submit_run, "time", SimpleNamespace(monotonic=clock))
    asked = submit_run.Run("", None, None, 8, 10.0, None, 2, RunPace(2, 2, begun=0.0), answered=1_000.0)
    line = SimpleNamespace(number=1)
    began = (99.0, 105.0, 110.0, 121.5, 142.0)  # the third try lasts eleven seconds, and the fourth
    assert [asked._is_own(line, at) for at in began] == [None, None, None, None, True]


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
    with RequestFile(good[0]) as asked:
        (line,), made = asked.lines(), []
    with Client(service) as client:
        for key in (f"submit-{line.request}", f"submit-{line.request}-1"):  # twice in a row
            job = client.submit_body(line.body, idempotency_key=key)
            made.append(job.id)
            end(client, worker, job, way)
            if "erased" not in way and way != "state_lost":
                break
    if row_kept:
        row = {"line": 1, "request": line.request, "id": job.id, "status": "failed", "error": {"code": way}}
        good[1].write_text(json.dumps(row) + "\n")
    with take_turns():
        assert run(good, service, retry_failed=row_kept) == 0
    assert statuses(good) == {1: "succeeded"}
    if way == "state_lost":
        assert rows(good)[1]["id"] not in made, "a lost state is there again only if it is sent again"


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
