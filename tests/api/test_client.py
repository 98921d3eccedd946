"""Our own client, blocking and awaiting, against the API on a socket and against servers that misbehave."""

import inspect
import json
import time

import httpx
import pytest

from d3serve import errors
from d3serve.client import AsyncClient, Client, verify_webhook
from d3serve.client import protocol as wire
from d3serve.signing import new_secret, signature_headers

QUESTIONS = {"spam": {"type": "noul", "instructions": "Is it spam?"}}
QUEUED = {"id": "job_1", "status": "queued", "done": False, "attempt": 0}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(wire, "BACKOFF_S", (0.01,))


def test_a_job_from_submit_to_answers(service, take_turns):
    with take_turns(), Client(service) as client:
        job = client.submit("hello", QUESTIONS, job={"metadata": {"case": "7"}})
        done = client.wait(job.id)
        assert done.done
        assert done.result["answers"]["spam"]["noul"] == 0.75
        assert client.result(job.id) == done.result
        assert client.ask({"n": 1.0}, QUESTIONS)["answers"] == done.result["answers"]
        assert [one.id for one in client.list(metadata={"case": "7"}).jobs] == [job.id]
        client.delete(job.id)
        with pytest.raises(errors.JobExpired):
            client.get(job.id)


@pytest.mark.anyio
async def test_the_same_awaited(service, take_turns):
    async with AsyncClient(service) as client:
        with take_turns():
            job = await client.submit("hello", QUESTIONS)
            names = [event.name async for event in client.events(job.id)]
            assert names[-2:] == ["answer", "done"]
            assert (await client.wait(job.id)).status == "succeeded"
            assert (await client.ask("x", QUESTIONS))["answers"]["spam"]["noul"] == 0.75
        waiting = await client.submit("y", QUESTIONS)
        assert (await client.cancel(waiting.id)).status == "canceled"
        assert (await client.retry(waiting.id)).status == "queued"
        with pytest.raises(errors.JobNotFinished, match=r"after 0\.05 s"):
            await client.wait(waiting.id, timeout_s=0.05)
        await client.delete(waiting.id)
        assert (await client.list(status="queued")).jobs == ()


def test_both_clients_have_the_same_methods():
    def methods(kind):
        return {name: str(inspect.signature(value).parameters.keys()) for name, value in vars(kind).items()
                if not name.startswith("_")}  # fmt: skip

    assert methods(Client) == methods(AsyncClient)


def test_events_follow_a_job_to_its_end(service, take_turns):
    with Client(service) as client:
        job = client.submit("hello", QUESTIONS)
        following = client.events(job.id)
        names = [next(following).name]
        with take_turns():
            names += [event.name for event in following]
    assert names[0] == "queued"
    assert names[-1] == "done"


@pytest.mark.usefixtures("worker")
def test_a_refusal_is_raised_as_its_own_class(service):
    with Client(service) as client:
        with pytest.raises(errors.InvalidQuestion) as caught:
            client.submit("hello", {"q": {"type": "choice", "criteria": {}}})
        assert caught.value.field == "questions.q.criteria"
        assert caught.value.details["status"] == 422
        assert caught.value.details["request_id"]
        with pytest.raises(errors.ModelNotFound):
            client.submit("hello", QUESTIONS, model="gpt-9")
        for call in (client.get, client.wait, client.result, client.cancel, client.retry, client.delete,
                     lambda job_id: list(client.events(job_id))):  # fmt: skip
            with pytest.raises(errors.JobNotFound):
                call("job_0")


class Server:
    """Answers from a list: a response, or an error to raise; keeps what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def __call__(self, request):
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, url="https://d3serve.test"):
        return Client(url, transport=httpx.MockTransport(self))


def refused(status, code, **headers):
    body = {"code": code, "detail": "no", "error": {"field": None}}
    return httpx.Response(status, json=body, headers=headers)


TROUBLES = {
    "no connection": httpx.ConnectError("refused"),
    "no answer": httpx.ReadTimeout("silent"),
    "cut off": httpx.RemoteProtocolError("closed"),
    "too many": refused(429, "rate_limited", **{"retry-after-ms": "10"}),
    "full": refused(503, "storage_unavailable", **{"retry-after": "0"}),
    "bad gateway": httpx.Response(502, text="<html>"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("url", ["http://d3serve.test", "https://d3serve.test"])
def test_a_submission_is_tried_again_under_one_key(trouble, url):
    """Over TLS too: a client that retries on plain http only never retries in production."""
    server = Server(TROUBLES[trouble], TROUBLES[trouble], httpx.Response(202, json=QUEUED))
    with server.client(url) as client:
        assert client.submit("hello", QUESTIONS).id == "job_1"
    assert len({request.headers["idempotency-key"] for request in server.asked}) == 1
    assert len({request.content for request in server.asked}) == 1


@pytest.mark.parametrize(
    ("status", "code"), [(422, "invalid_question"), (401, "unauthorized"), (500, "internal_error")]
)
def test_what_trying_again_cannot_mend_is_told_at_once(status, code):
    server = Server(refused(status, code))
    with server.client() as client, pytest.raises(errors.error_class(code)):
        client.submit("hello", QUESTIONS)
    assert len(server.asked) == 1


def test_a_server_that_stays_away_is_an_error_after_six_tries():
    server = Server(*[httpx.ConnectError("refused")] * 6)
    with server.client() as client, pytest.raises(errors.StorageUnavailable, match="no answer"):
        client.get("job_1")
    assert len(server.asked) == 6


def test_a_status_that_we_do_not_know_ends_the_wait_if_the_job_is_done():
    server = Server(
        httpx.Response(200, json=QUEUED),
        httpx.Response(200, json=QUEUED | {"status": "aborted", "done": True}),
    )
    with server.client() as client:
        assert client.wait("job_1").status == "aborted"


def test_every_request_has_an_end():
    server = Server(*[httpx.Response(200, json=QUEUED)] * 3)
    with server.client() as client, pytest.raises(errors.JobNotFinished):
        client.wait("job_1", timeout_s=0)
    limits = server.asked[0].extensions["timeout"]
    assert all(limit is not None and limit <= 60 for limit in limits.values()), limits


@pytest.mark.parametrize("header", ["999999", "-1", "soon", ""])
def test_a_server_cannot_put_us_to_sleep_for_long(header):
    assert wire.pause_s(httpx.Response(503, headers={"retry-after": header}), 0) <= 60


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"[]", b'{"code":1}', b'{"code":"x","detail":"y"}'])
def test_an_error_that_is_not_ours_is_told_with_its_text(body):
    error = wire.refusal(httpx.Response(500, content=body))
    assert isinstance(error, errors.D3ServeError)
    assert "500" in error.message


def stream(*events, cut=False):
    def lines():
        for place, name in events:
            yield f"id: {place}\nevent: {name}\ndata: {json.dumps(place)}\n\n".encode()
        if cut:
            raise httpx.ReadError("cut")

    class Body(httpx.SyncByteStream):
        def __iter__(self):
            return lines()

    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Body())


def test_a_broken_event_stream_is_taken_up_where_it_broke():
    server = Server(
        stream(("1.0.0", "queued"), cut=True),
        httpx.ConnectError("down"),
        stream(("1.1.0", "started"), ("1.4.0", "done")),
    )
    with server.client() as client:
        assert [event.name for event in client.events("job_1")] == ["queued", "started", "done"]
    assert [request.headers.get("last-event-id") for request in server.asked] == [None, "1.0.0", "1.0.0"]


def test_a_webhook_is_verified_by_the_client():
    secret = new_secret()
    headers = signature_headers("msg_1", int(time.time()), b"{}", [secret])
    verify_webhook(headers, b"{}", secret)
    with pytest.raises(errors.InvalidRequest):
        verify_webhook(headers, b"{ }", secret)
