"""The stock clients of both dialects against the API on a socket, unchanged but for the address."""

import asyncio
import contextlib
import threading
import time
from types import SimpleNamespace

import openai
import pytest
import typesafe_sdk
from media_files import picture, saved
from typesafe_sdk import Choice, Noul, RetryPolicy, Score, TypeSafeClient

from d3serve.api import bounds, synchronous
from d3serve.api.app import create_app

QUESTIONS = {
    "spam": Noul(instructions="Is it spam?"),
    "team": Choice(instructions="Which team?", criteria={"billing": "money", "technical": None}),
    "urgency": Score(instructions="How urgent?", criteria=["later", "this week", "today"]),
}


@contextlib.contextmanager
def sdk(address, **options):
    with TypeSafeClient(api_key="any-key", base_url=address, **options) as client:
        yield client


def jobs_made(worker):
    return worker.turns._table.client.zcard(worker.turns._key("jobs", "public"))


def test_the_stock_sdk_works_unchanged(service, worker, take_turns):
    with take_turns(), sdk(service) as client:
        answer = client.system_one(state={"ticket": "I was charged twice. " * 200}, questions=QUESTIONS)
        assert [model.name for model in client.models.list().models] == ["vllm-sr/d3-tiny"]
    assert answer.model == "vllm-sr/d3-tiny@abc123", "the alias is answered with the true name"
    assert answer.nouls["spam"].noul == 0.75
    assert answer.choices["team"].choice == "technical"
    assert answer.choices["team"].probabilities == {"billing": 0.25, "technical": 0.75}
    assert list(answer.scores["urgency"].legend.values()) == ["later", "this week", "today"]
    assert jobs_made(worker) == 1


def test_a_call_longer_than_the_sdk_waits_is_one_job_for_all_its_tries(
    settings, worker, take_turns, serving, monkeypatch
):
    """The wait is cut to 0.5 s here; the SDK's three tries then cover 1.5 s and the job takes 0.7."""
    monkeypatch.setattr(bounds, "SYNC_WAIT_S", 0.5)
    with serving(create_app(settings)) as address, take_turns(delay_s=0.7), sdk(address) as client:
        answer = client.system_one(state="hello", questions=QUESTIONS)
    assert answer.nouls["spam"].noul == 0.75
    assert jobs_made(worker) == 1


def test_when_tries_run_out_the_exception_says_where_the_job_is(settings, worker, serving, monkeypatch):
    paused = []
    monkeypatch.setattr("tenacity.nap.time", SimpleNamespace(sleep=paused.append))  # the SDK's clock
    monkeypatch.setattr(bounds, "SYNC_WAIT_S", 0.05)
    with (
        serving(create_app(settings)) as address,
        sdk(address) as client,
        pytest.raises(typesafe_sdk.TypeSafeAPIError) as caught,
    ):
        client.system_one(state="hello", questions=QUESTIONS)
    assert paused == [0, 0], "retry-after-ms: 0 was not obeyed"
    error = caught.value
    assert error.status == 504
    assert error.body["code"] == "still_running"
    assert error.headers["location"] == f"/v1/jobs/{error.body['job_id']}"
    assert error.request_id == error.body["request_id"]
    assert jobs_made(worker) == 1


@pytest.mark.parametrize(
    ("question", "code"),
    [
        ({"type": "noul", "instructions": "x", "instuctions": "y"}, "invalid_question"),
        ({"type": "box", "instructions": "where?"}, "unsupported_modality"),
        ({"type": "choice", "criteria": {"a": None}}, "invalid_question"),
    ],
)
def test_a_permanent_refusal_is_tried_once_and_told_in_words(question, code, service, worker):
    with sdk(service) as client, pytest.raises(typesafe_sdk.TypeSafeAPIError) as caught:
        client.system_one(state="hello", questions={"q": question})
    assert caught.value.status == 422
    assert caught.value.body["code"] == code
    assert "questions.q" in str(caught.value)
    assert caught.value.request_id
    assert jobs_made(worker) == 0


@pytest.mark.usefixtures("worker")
def test_an_unknown_model_is_the_sdks_own_error_class(service):
    with sdk(service, model="gpt-9") as client, pytest.raises(typesafe_sdk.TypeSafeAPIError) as caught:
        client.system_one(state="hello", questions=QUESTIONS)
    assert caught.value.status == 404


@pytest.mark.usefixtures("worker")
def test_an_image_is_refused_once_with_words(service):
    png = saved(picture(20, 20), "PNG")
    with sdk(service) as client, pytest.raises(typesafe_sdk.TypeSafeError) as caught:
        client.system_one(state=[typesafe_sdk.Image(png)], questions=QUESTIONS)
    assert caught.value.status == 422
    assert "reads no images" in str(caught.value)


def test_a_failed_job_is_run_again_by_the_sdks_retry(service, worker):
    """The device failed once: the retry carries the same bytes and must not be handed the failure."""
    done = threading.Event()

    def fail_then_answer():
        turn = worker.claim()
        while not turn.jobs:
            turn = worker.claim()
        worker.fail(turn, "device_error", "an illegal address")
        while not done.wait(0.01):
            worker.work()

    thread = threading.Thread(target=fail_then_answer)
    thread.start()
    try:
        with sdk(service, retry=RetryPolicy(max_retries=1)) as client:
            assert client.system_one(state="hello", questions=QUESTIONS).nouls["spam"].noul == 0.75
    finally:
        done.set()
        thread.join()
    assert jobs_made(worker) == 1


@pytest.mark.anyio
async def test_identical_calls_that_find_a_failed_job_run_it_again_once(client, worker):
    body = {
        "model": "jev-latest",
        "state": "hello",
        "questions": {"q": {"type": "noul", "instructions": "x"}},
    }
    asking = asyncio.create_task(client.post("/v1/systemone", json=body))
    turn = worker.claim()
    while not turn.jobs:
        await asyncio.sleep(0.01)
        turn = worker.claim()
    worker.fail(turn, "device_error", "an illegal address")
    assert (await asking).status_code == 500
    again = [asyncio.create_task(client.post("/v1/systemone", json=body)) for _ in range(20)]
    while not worker.work():  # noqa: ASYNC110 - the calls say nothing until their job is done
        await asyncio.sleep(0.01)
    assert {answer.status_code for answer in await asyncio.gather(*again)} == {200}


def canceled(worker):
    return int(worker.turns._table.client.hget(worker.turns._key("finished"), "canceled") or 0)


@pytest.mark.parametrize("comes_back", [False, True])
def test_an_abandoned_call_cancels_its_job_unless_somebody_asks_again(
    comes_back, service, worker, monkeypatch
):
    monkeypatch.setattr(synchronous, "ABANDONED_AFTER_S", 1.5)
    with sdk(service, retry=RetryPolicy(max_retries=0)) as client:
        with pytest.raises(typesafe_sdk.TypeSafeError):
            client.system_one(state="hello", questions=QUESTIONS, timeout=0.7)
        if comes_back:
            with pytest.raises(typesafe_sdk.TypeSafeError):
                client.system_one(state="hello", questions=QUESTIONS, timeout=2.5)
            assert canceled(worker) == 0, "somebody was waiting for it"
    deadline = time.monotonic() + 60
    while canceled(worker) == 0:
        assert time.monotonic() < deadline, "nobody waits, yet the job was not canceled"
        time.sleep(0.02)
    assert jobs_made(worker) == 1


def test_the_openai_client_works_unchanged(service, take_turns):
    with take_turns(), openai.OpenAI(api_key="any-key", base_url=f"{service}/v1") as client:
        decision = client.decisions.create(
            model="jev-latest",
            input="I was charged twice.",
            safety_identifier="user-7",
            questions=[
                {"type": "predicate", "name": "refund", "instructions": "The customer asks for a refund."},
                {"type": "choice", "instructions": [{"type": "input_text", "text": "Which team?"}],
                 "choices": [{"value": "billing", "description": "money"}, {"value": True}]},
                {"type": "score", "name": "urgency", "instructions": "How urgent?",
                 "levels": [{"label": "later"}, {"label": "today", "description": "now"}]},
            ],
        )  # fmt: skip
        models = [model.id for model in client.models.list()]
    predicate, choice, score = decision.answers
    assert (predicate.type, predicate.name, predicate.probability) == ("predicate", "refund", 0.75)
    assert choice.choice is True, "a bool is not the word for it"
    assert [(one.value, one.probability) for one in choice.probabilities] == [("billing", 0.25), (True, 0.75)]
    assert [(one.value, one.label) for one in score.probabilities] == [(0, "later"), (1, "today")]
    assert decision.usage.total_tokens == 20
    assert models == ["vllm-sr/d3-tiny"]


def test_the_openai_client_may_ask_as_many_questions_as_openai_allows(service, take_turns):
    questions = [{"type": "predicate", "instructions": f"It is number {i}."} for i in range(400)]
    with take_turns(), openai.OpenAI(api_key="any-key", base_url=f"{service}/v1") as client:
        decision = client.decisions.create(model="jev-latest", input="a number", questions=questions)
    assert len(decision.answers) == 400


@pytest.mark.usefixtures("worker")
def test_the_openai_client_understands_a_refusal(service):
    with openai.OpenAI(api_key="any-key", base_url=f"{service}/v1") as client:
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            client.decisions.create(
                model="jev-latest", input="x", questions=[{"type": "choice", "choices": []}]
            )
        assert caught.value.code == "invalid_question"
        assert caught.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.decisions.create(
                model="gpt-9", input="x", questions=[{"type": "predicate", "instructions": "y"}]
            )
