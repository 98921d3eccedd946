"""The thread that counts beside the turns: the numbers and the refusals that a job would get, and no job."""

import json
from asyncio import create_task, gather, to_thread, wait
from contextlib import aclosing

import pytest

from d3serve.errors import NoWorker, Overloaded, RateLimited
from d3serve.schemas import DecisionRequest
from d3serve.schemas.counting import CountRequest
from d3serve.settings import Settings
from d3serve.store import counting as desk_module
from d3serve.store.counting import CountDesk, CountQueue
from d3serve.store.encode import encode_request
from d3serve.worker.counting import Counter
from d3serve.worker.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
WORDS = "a text that no log may hold"


@pytest.fixture
def settings(redis_url, raw_redis):  # noqa: ARG001 - the server is emptied first
    return Settings(redis_url=redis_url, namespace="counting", model="fake:", max_interactive_tokens=100)


@pytest.fixture
def counter(settings):
    engine = FakeEngine.load("fake:?max_length=5000", pass_tokens=16_384, pass_questions=512)
    found = Counter(CountQueue.open(settings), engine, settings)
    yield found
    found.stop()
    if found.is_alive():
        found.join(10)


def request(state="a parcel", lane="", **questions):
    asked = questions or {"q": "Is it late?"}
    return CountRequest(
        tenant="me", model="fake", lane=lane, state=f"={state}",
        questions=json.dumps({name: {"type": "noul", "instructions": text} for name, text in asked.items()}),
    )  # fmt: skip


def test_each_question_is_counted_and_the_state_once(counter):
    found = counter.count(request(a="Is it late?", b="Is it late, and has anybody written to us about it?"))
    assert found.refused == []
    assert list(found.questions) == ["a", "b"]
    own = [question.tokens for question in found.questions.values()]
    assert own[0] < own[1]
    assert found.total_tokens == found.state_tokens + sum(own)
    assert found.input_tokens == 2 * found.state_tokens + sum(own)
    assert [each.prompt_tokens - found.state_tokens for each in found.questions.values()] == own


def test_what_would_be_refused_is_told_beside_what_would_not(counter):
    found = counter.count(request(lane="interactive", short="so?", long="so " * 200))
    assert list(found.questions) == ["short"]
    assert [(each.code, each.field) for each in found.refused] == [("max_tokens_exceeded", "questions.long")]


def test_a_request_of_which_nothing_fits_has_no_numbers(counter):
    found = counter.count(request("so " * 400, lane="interactive"))
    assert (found.state_tokens, found.total_tokens, found.questions) == (None, None, {})
    assert [each.code for each in found.refused] == ["max_tokens_exceeded"]


def test_a_job_that_is_too_large_as_a_whole_is_counted_all_the_same(settings, counter):
    counter._preparer._settings = settings.model_copy(update={"max_job_tokens_offline": 20})
    found = counter.count(request("a parcel that came late " * 5))
    assert found.total_tokens > 20
    assert [(each.code, each.field) for each in found.refused] == [("max_tokens_exceeded", "questions")]


def test_a_fault_of_ours_is_told_without_its_words(counter, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError(WORDS)

    monkeypatch.setattr(counter._engine, "prepare", broken)
    (refusal,) = counter.count(request()).refused
    assert (refusal.code, WORDS in refusal.message) == ("internal_error", False)


@pytest.fixture
async def desk(settings):
    found = CountDesk.open(settings)
    yield found
    await found.aclose()


def encoded(state="a parcel"):
    body = {
        "model": "fake",
        "state": state,
        "questions": {"q": {"type": "noul", "instructions": "Is it late?"}},
    }
    return encode_request(DecisionRequest.model_validate(body))


async def test_a_request_goes_to_a_worker_and_back_and_nothing_stays(counter, desk, raw_redis):
    counter.start()
    found = await desk.count(encoded(), tenant="me")
    assert found.questions["q"].prompt_tokens == found.total_tokens
    assert (await desk.count(encoded({"a": 1}), tenant="me")).refused == []
    assert raw_redis.keys("d3:{counting}:count*") == []
    assert not desk._asking


async def test_a_request_that_names_a_revision_is_for_workers_of_that_one(counter, desk, monkeypatch):
    monkeypatch.setattr(desk_module, "WITHIN_S", 1.0)
    counter.start()
    with pytest.raises(NoWorker):
        await desk.count(encoded(), tenant="me", revision="another")


async def test_without_a_worker_it_is_told_in_time_and_the_request_is_taken_back(
    desk, raw_redis, monkeypatch
):
    monkeypatch.setattr(desk_module, "WITHIN_S", 1.0)
    with pytest.raises(NoWorker, match="within 1 s"):
        await desk.count(encoded(), tenant="me")
    assert raw_redis.keys("d3:{counting}:count*") == []


async def test_no_more_wait_than_may(desk, raw_redis):
    for _ in range(desk_module.MAX_WAITING):
        raw_redis.rpush("d3:{counting}:counts:", "another")
    with pytest.raises(Overloaded):
        await desk.count(encoded(), tenant="me")
    assert raw_redis.keys("d3:{counting}:count:*") == []


async def test_no_more_wait_than_may_though_all_come_at_once(settings, raw_redis, monkeypatch):
    """All of them see a short list before the first has written to it."""
    monkeypatch.setattr(desk_module, "WITHIN_S", 2.0)

    async def asked(number):
        async with aclosing(CountDesk.open(settings)) as desk:
            with pytest.raises((Overloaded, NoWorker)) as refused:
                await desk.count(encoded(), tenant=f"tenant {number}")
            return refused.type

    kinds = await gather(*(asked(number) for number in range(2 * desk_module.MAX_WAITING)))
    assert kinds.count(NoWorker) == desk_module.MAX_WAITING
    assert raw_redis.keys("d3:{counting}:count*") == []


async def test_no_tenant_takes_the_places_of_the_others(desk, monkeypatch):
    monkeypatch.setattr(desk_module, "WITHIN_S", 2.0)

    async def asked(tenant):
        with pytest.raises((RateLimited, NoWorker)) as refused:
            await desk.count(encoded(), tenant=tenant)
        return refused.type

    kinds = await gather(*(asked("one") for _ in range(desk_module.MAX_WAITING)), asked("another"))
    assert kinds.count(RateLimited) == desk_module.MAX_WAITING - desk_module.MAX_OF_TENANT
    assert kinds[-1] is NoWorker, "it was let in"
    assert await asked("one") is NoWorker, "and so is the first, once its requests have ended"


async def test_who_goes_away_leaves_nothing(desk, raw_redis):
    asking = create_task(desk.count(encoded(), tenant="me"))
    assert await to_thread(raw_redis.blpop, "d3:{counting}:counts:", 60)
    while not asking.done():  # as a call is stopped whose key has gone: redis-py may lose a cancellation
        asking.cancel()
        await wait([asking], timeout=0.2)
    assert asking.cancelled()
    assert raw_redis.keys("d3:{counting}:count*") == []
    assert not desk._asking


async def test_a_request_whose_texts_are_gone_stops_nobody(counter, desk, raw_redis):
    for text in ("", "{}", "another", "so " * 1000):
        raw_redis.rpush("d3:{counting}:counts:", text)
    raw_redis.hset("d3:{counting}:count:another", mapping={"state": "=", "more": "than is known"})
    counter.start()
    assert (await desk.count(encoded(), tenant="me")).refused == []
