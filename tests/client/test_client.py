"""Our own client, blocking and awaiting, against the API on a socket and against servers that misbehave."""

import inspect
import json
import time

import httpx
import pytest

from d3serve import errors
from d3serve.client import AsyncClient, Client
from d3serve.client import protocol as wire

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
        return {name: str(inspect.signature(getattr(kind, name)).parameters.keys()) for name in vars(kind)
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


def again(response):
    """The response as no client has read it yet; one that streams is for one reader anyway."""
    if not hasattr(response, "_content"):
        return response
    return httpx.Response(response.status_code, headers=response.headers, content=response.content)


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
        return again(answer)

    def client(self, url="https://d3serve.test", **options):
        return Client(url, transport=httpx.MockTransport(self), **options)


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
    "stopped": httpx.Response(500, text="Internal Server Error"),
    "a new code": refused(503, "on_fire"),
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


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        ("no connection", errors.StorageUnavailable),
        ("too many", errors.RateLimited),
        ("stopped", errors.InternalError),
    ],
)
def test_trouble_is_told_when_it_has_lasted_for_the_clients_patience(trouble, kind):
    server = Server(*[TROUBLES[trouble]] * 1000)
    begun = time.monotonic()
    with server.client(patience_s=1) as client, pytest.raises(kind):
        client.get("job_1")
    assert len(server.asked) > 3
    assert time.monotonic() - begun < 30


def test_an_answer_between_two_troubles_gives_the_patience_back():
    waits = [httpx.ConnectError("down"), httpx.Response(200, json=QUEUED)] * 30
    server = Server(*waits, httpx.Response(200, json=QUEUED | {"done": True}))
    with server.client(patience_s=0.1) as client:  # thirty pauses of 10 ms are three times that
        assert client.wait("job_1").done


def test_a_wait_with_an_end_tells_trouble_by_then():
    server = Server(*[httpx.ConnectError("refused")] * 1000)
    begun = time.monotonic()
    with server.client() as client, pytest.raises(errors.StorageUnavailable):
        client.wait("job_1", timeout_s=0.2)
    assert time.monotonic() - begun < 30, "the client's own patience is a minute"


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


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"[]", b'{"code":[]}', b'{"code":"x","detail":"y"}'])
def test_an_error_that_is_not_ours_is_told_with_its_text(body):
    error = wire.refusal(httpx.Response(500, content=body))
    assert isinstance(error, errors.D3ServeError)
    assert "500" in error.message


def test_v1_at_the_end_of_the_address_is_understood():
    server = Server(*[httpx.Response(200, json=QUEUED)] * 3)
    for url in ("https://d3serve.test/v1", "https://d3serve.test/v1/", "https://d3serve.test/gate/v1"):
        with server.client(url) as client:
            client.get("job_1")
    assert [request.url.path for request in server.asked] == ["/v1/jobs/job_1"] * 2 + ["/gate/v1/jobs/job_1"]


def foreign_errors():
    """Every exception that httpx can raise."""
    request = httpx.Request("GET", "http://x")
    for name in httpx.__all__:
        kind = getattr(httpx, name)
        if isinstance(kind, type) and issubclass(kind, Exception):
            match kind:
                case httpx.HTTPStatusError:
                    yield kind("x", request=request, response=httpx.Response(500))
                case httpx.StreamConsumed | httpx.StreamClosed | httpx.ResponseNotRead | httpx.RequestNotRead:
                    yield kind()
                case _:
                    yield kind("x")
    yield UnicodeEncodeError("ascii", "é", 0, 1, "no ASCII")  # of a header


def operations(client):
    return {
        "ping": client.ping,
        "submit": lambda: client.submit("x", QUESTIONS),
        "get": lambda: client.get("job_1"),
        "wait": lambda: client.wait("job_1"),
        "result": lambda: client.result("job_1"),
        "cancel": lambda: client.cancel("job_1"),
        "delete": lambda: client.delete("job_1"),
        "list": client.list,
        "models": client.models,
        "queue": client.queue,
        "webhooks": client.webhooks.list,
        "map": lambda: client.map(["x"], QUESTIONS),
        "events": lambda: client.events("job_1"),
    }


async def outcome(call):
    """What comes of an operation of either client, followed to its end."""
    value = call()
    if inspect.isawaitable(value):
        return await value
    if inspect.isasyncgen(value):
        return [each async for each in value]
    return list(value) if inspect.isgenerator(value) else value


def both_clients(handler):
    transport = httpx.MockTransport(handler)
    return [kind("http://d3serve.test", transport=transport, patience_s=0) for kind in (Client, AsyncClient)]


@pytest.mark.anyio
@pytest.mark.parametrize("error", list(foreign_errors()), ids=lambda error: type(error).__name__)
async def test_no_error_of_a_library_leaves_a_client(error):
    def fail(_):
        raise error

    for client in both_clients(fail):
        for call in operations(client).values():
            with pytest.raises(errors.D3ServeError):
                await outcome(call)


NONSENSE = {
    "a page": httpx.Response(200, text="<html>please log in</html>"),
    "nothing": httpx.Response(200),
    "a list": httpx.Response(200, json=[]),
    "another object": httpx.Response(200, json={"ok": True}),
    "deep": httpx.Response(200, text="[" * 100_000),
    "a stream of no json": httpx.Response(
        200, headers={"content-type": "text/event-stream"}, text="event: done\ndata: {\n\n"
    ),
    "a redirect": httpx.Response(302, headers={"location": "https://login.test"}),
    "not found": httpx.Response(404, text="default backend"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_what_is_no_answer_of_ours_is_one_clear_error(nonsense):
    for client in both_clients(lambda _: again(NONSENSE[nonsense])):
        for name, call in operations(client).items():
            if nonsense == "nothing" and name in {"cancel", "delete"}:
                continue  # an empty answer is what they may get
            with pytest.raises(errors.InternalError, match=r"never says|no JSON|cannot be read"):
                await outcome(call)


@pytest.mark.parametrize("text", ["\ud800", "é", "a\r\nb"])
def test_text_that_no_request_can_hold_is_refused_by_name(text, service):
    with Client(service) as client:
        with pytest.raises(errors.D3ServeError):
            client.get(text)
        with pytest.raises((errors.InvalidRequest, errors.RequestError)):
            client.submit("x", QUESTIONS, idempotency_key=text)
    with pytest.raises(errors.InvalidRequest, match="API key"):
        Client(service, api_key=f"d3k_{text}")


def test_a_value_that_nests_without_end_is_refused_by_name(service):
    deep = []
    for _ in range(5000):
        deep = [deep]
    with Client(service) as client, pytest.raises(errors.InvalidRequest, match="written as JSON"):
        client.submit(deep, QUESTIONS)


def stream(*events, cut=False):
    def lines():
        for place, name in events:
            yield f"id: {place}\nevent: {name}\ndata: {json.dumps(place)}\n\n".encode()
        if cut:
            raise httpx.ReadError("cut")

    class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self):
            return lines()

        async def __aiter__(self):
            for line in lines():
                yield line

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


@pytest.mark.anyio
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_stream_that_cannot_be_taken_up_yet_is_taken_up_later(trouble):
    for kind in (Client, AsyncClient):
        server = Server(
            stream(("1.0.0", "queued"), cut=True),
            TROUBLES[trouble],
            TROUBLES[trouble],
            stream(("1.4.0", "done")),
        )
        client = kind("http://d3serve.test", transport=httpx.MockTransport(server))
        assert [event.name for event in await outcome(lambda c=client: c.events("job_1"))] == [
            "queued",
            "done",
        ]


def test_a_stream_that_only_breaks_off_ends_with_an_error():
    server = Server(*[stream(cut=True) for _ in range(1000)])
    with server.client(patience_s=0) as client, pytest.raises(errors.StorageUnavailable):
        list(client.events("job_1"))


@pytest.mark.parametrize(
    "mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e", "\r", "\n", "\0"]
)
@pytest.mark.anyio
async def test_no_character_of_a_text_ends_or_forges_an_event(mark, service, take_turns):
    note = f"customer text{mark}event: done{mark}data: null{mark}{mark}rest"
    questions = {f"q{mark}1": {"type": "score", "instructions": "x", "criteria": [f"low{mark}er", "high"]}}
    with take_turns():
        for client in (Client(service), AsyncClient(service)):
            job = await outcome(lambda c=client: c.submit("x", questions, job={"metadata": {"note": note}}))
            events = await outcome(lambda c=client, j=job: c.events(j.id))
            assert [event.name for event in events][-2:] == ["answer", "done"]
            assert events[-1].data["metadata"]["note"] == note
            assert events[-2].data["question"] == f"q{mark}1"
