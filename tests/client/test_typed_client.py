"""Questions and answers with types, many states at once, and a client that the environment sets up."""

import httpx
import pytest

from d3serve import errors
from d3serve.client import Answers, AsyncClient, Choice, Client, Score, YesNo
from d3serve.client import protocol as wire
from d3serve.client.questions import questions_json
from d3serve.schemas.questions import KINDS

ASKED = {
    "spam": YesNo("Is it spam?", yes="an advertisement", no="wanted"),
    "plain": YesNo("Is it?"),
    "team": Choice("Which team?", {"billing": "money", "shipping": None}),
    "side": Choice("Which side?", ["left", "right"]),
    "urgency": Score("How urgent?", ["later", "this week", "today"]),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(wire, "BACKOFF_S", (0.01,))


def test_a_question_is_what_the_api_takes():
    told = questions_json({**ASKED, "dict": {"type": "noul", "instructions": "x"}})
    assert told["spam"] == {
        "type": "noul", "instructions": "Is it spam?", "criteria": {"true": "an advertisement", "false": "wanted"},
    }  # fmt: skip
    assert told["plain"] == {"type": "noul", "instructions": "Is it?"}
    assert told["side"]["criteria"] == {"left": None, "right": None}
    assert list(told) == [*ASKED, "dict"]
    for question in told.values():
        KINDS[question["type"]].model_validate(question)


@pytest.mark.anyio
async def test_answers_have_names_and_stay_dicts(service, take_turns):
    with take_turns(), Client(service) as client:
        told = client.ask("hello", ASKED)
        async with AsyncClient(service) as other:
            assert (await other.ask("hello", ASKED)).answers == told.answers
            assert (await other.get((await other.list()).jobs[0].id)).result.answers == told.answers
    assert isinstance(told, Answers)
    spam, team, urgency = (told.answers[name] for name in ("spam", "team", "urgency"))
    assert (spam.probability, spam.yes, spam.probabilities) == (0.75, True, {"yes": 0.75, "no": 0.25})
    assert (team.choice, team.probability, team.confidence) == ("shipping", 0.75, 0.5)
    assert (urgency.score, urgency.level) == (1.5, "today")
    assert told["answers"]["spam"]["noul"] == 0.75
    assert told["answers"]["team"] == {
        "type": "choice", "choice": "shipping", "probabilities": {"billing": 0.25, "shipping": 0.75}, "confidence": 0.5,
    }  # fmt: skip
    assert told.model == "vllm-sr/d3-tiny@abc123"
    assert told.usage["questions"] == 5


def test_an_answer_that_is_missing_says_why_and_one_of_a_new_kind_is_what_it_is():
    told = Answers.from_json({
        "model": "m", "usage": {},
        "answers": {"a": {"type": "error", "error": {"code": "x", "message": "y"}}, "b": {"type": "rank", "rank": [2]}},
    })  # fmt: skip
    missing, new = told.answers.values()
    assert (missing.failed, missing.code, missing.message) == (True, "x", "y")
    assert (new.failed, new["rank"]) == (False, [2])


def states(count, taken):
    for number in range(count):
        taken.append(number)
        yield f"state {number}"


def test_many_states_are_answered_in_their_order_and_few_are_taken_ahead(service, take_turns, worker):
    taken, told = [], []
    with take_turns(), Client(service) as client:
        for place, answers in enumerate(
            client.map(states(20, taken), ASKED, at_once=4, progress=told.append)
        ):
            assert answers.answers["spam"].yes
            assert len(taken) <= place + 4, "more states were taken than may be at the server"
    assert told == list(range(1, 21))
    assert worker.turns._table.client.zcard(worker.turns._key("jobs", "public")) == 20


@pytest.mark.anyio
async def test_the_same_awaited_with_what_fails_in_its_place(service, take_turns):
    sent = ["one", None, "three"]
    async with AsyncClient(service) as client:
        with take_turns():
            found = [one async for one in client.map(sent, ASKED, return_exceptions=True)]
            with pytest.raises(errors.InvalidRequest):
                [one async for one in client.map(sent, ASKED)]
    assert [type(one) for one in found] == [Answers, errors.InvalidRequest, Answers]


def test_a_job_that_its_worker_failed_is_run_again_so_often_and_no_more():
    asked = []

    def answer(request):
        asked.append(request.url.path)
        error = {"code": "device_error", "message": "an illegal address"}
        ended = {"id": "job_1", "status": "failed", "done": True, "attempt": 1, "error": error}
        return httpx.Response(200, json=ended)

    with Client("https://d3serve.test", transport=httpx.MockTransport(answer)) as client:
        (found,) = client.map(["x"], ASKED, retries=2, return_exceptions=True)
        with pytest.raises(errors.DeviceError, match="an illegal address"):
            list(client.map(["x"], ASKED, retries=0))
    assert isinstance(found, errors.DeviceError)
    assert [path.endswith("/retry") for path in asked].count(True) == 2


@pytest.mark.parametrize("code", [401, 429])
def test_what_any_state_would_be_told_ends_the_map(code):
    body = {
        "code": {401: "unauthorized", 429: "rate_limited"}[code],
        "detail": "no",
        "error": {"field": None},
    }
    transport = httpx.MockTransport(lambda _: httpx.Response(code, json=body))
    with (
        Client("https://d3serve.test", transport=transport, patience_s=0) as client,
        pytest.raises((errors.Unauthorized, errors.RateLimited)),
    ):
        list(client.map(["x"] * 10, ASKED, return_exceptions=True))


def every_error():
    found = [errors.D3ServeError]
    for kind in found:
        found += kind.__subclasses__()
    return found


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_what_the_server_names_is_what_is_raised(kind):
    body = {"code": kind.code, "detail": "no", "error": {"field": None}}
    answer = httpx.Response(kind.http_status, json=body)
    assert type(wire.refusal(answer)) is kind


def test_the_environment_names_server_and_key(service, monkeypatch, tmp_path):
    sent = []

    def answer(request):
        sent.append((str(request.url), request.headers.get("authorization")))
        return httpx.Response(200, json={"status": "ok"})

    def ping(*address, **options):
        with Client(*address, transport=httpx.MockTransport(answer), **options) as client:
            client.ping()
        return sent[-1]

    for name in ("D3SERVE_URL", "D3SERVE_API_KEY", "D3SERVE_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert ping() == ("http://127.0.0.1:8000/healthz", None)
    (tmp_path / "key").write_text("d3k_file\n")
    monkeypatch.setenv("D3SERVE_URL", "https://d3serve.test/v1")
    monkeypatch.setenv("D3SERVE_API_KEY_FILE", str(tmp_path / "key"))
    assert ping() == ("https://d3serve.test/healthz", "Bearer d3k_file")
    monkeypatch.setenv("D3SERVE_API_KEY", "d3k_env")
    assert ping() == ("https://d3serve.test/healthz", "Bearer d3k_env")
    assert ping(api_key="d3k_given") == ("https://d3serve.test/healthz", "Bearer d3k_given")
    assert ping("https://another.test") == ("https://another.test/healthz", None), (
        "the key went to another server"
    )
    monkeypatch.setenv("D3SERVE_URL", service)
    with Client.from_env(patience_s=1) as client:
        client.ping()


@pytest.mark.anyio
async def test_models_queue_and_webhooks_are_told(service, worker):
    with Client(service) as client:
        assert [model["name"] for model in client.models()] == [worker.model.name]
        assert client.queue()["object"] == "decision.queue"
        added = client.webhooks.add("https://example.com/hook", ["job.failed"])
        assert added["secret"].startswith("whsec_")
        assert client.webhooks.secret().startswith("whsec_")
        async with AsyncClient(service) as other:
            assert [one["id"] for one in await other.webhooks.list()] == [added["id"]]
            assert await other.webhooks.secret() == client.webhooks.secret()
            assert await other.models() == client.models()
            assert (await other.queue())["object"] == "decision.queue"
            assert await other.webhooks.deliveries() == ()
            with pytest.raises(errors.NotFound):
                await other.webhooks.redeliver("dlv_1")
            await other.webhooks.remove(added["id"])
        assert client.webhooks.list() == ()
        with pytest.raises(errors.InvalidRequest, match="D3SERVE_WEBHOOK_ALLOW"):
            client.webhooks.add("https://127.0.0.1/hook")
