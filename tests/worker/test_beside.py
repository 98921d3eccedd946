"""Short work beside a long pass, with real workers: it overtakes, the long pass keeps its share."""

import json
import time
from itertools import pairwise

import pytest

from d3serve.api.app import create_app
from d3serve.client import AsyncClient
from d3serve.model import capacity
from d3serve.model import engine as engine_module
from d3serve.model.engine import DecisionEngine
from d3serve.store.turns import TurnStore
from d3serve.worker import yields as yields_module
from d3serve.worker.turn import TurnRunner

LONG = "x" * 40_000  # 10,000 tokens
SECOND = "ktoken_ms=100&yield_ms=5"  # the fake engine reads LONG in a second


@pytest.mark.anyio
async def test_a_short_question_is_answered_while_a_long_state_is_read(service):
    worker = service.start_worker("ktoken_ms=500&yield_ms=5")
    await service.ready()
    long = await service.submit(LONG, lane="offline")
    await service.running(long)
    asked = []
    for number in range(3):
        asked.append(await service.finish(await service.submit(f"short {number}")))
        assert (await service.jobs.get(long, "me")).status == "running"
    done = await service.finish(long)
    assert (done.status, done.attempt) == ("succeeded", 1)
    assert all((job.status, job.attempt) == ("succeeded", 1) for job in asked)
    assert all(done.started_at < job.started_at < job.finished_at < done.finished_at for job in asked)
    assert len({a_pass["pid"] for a_pass in service.passes()}) == 1
    assert len(service.passes()) == 4, "the long state is read once"
    await service.settled()
    assert await service.finished() == {"succeeded": 4}
    assert worker.alive()


@pytest.mark.anyio
async def test_a_short_question_is_answered_while_a_long_text_is_tokenized(service):
    service.start_worker("prepare_ms=200&ktoken_ms=10&yield_ms=5")
    await service.ready()
    long = await service.submit("x" * 60_000)  # 15,000 tokens, three seconds of preparing
    async for job in service.jobs.watch(long, "me"):
        if job.status == "running":
            break
    short = await service.finish(await service.submit("short"))
    assert (await service.jobs.get(long, "me")).progress.stage == "preparing"
    done = await service.finish(long)
    assert [(job.status, job.attempt) for job in (short, done)] == [("succeeded", 1)] * 2
    assert short.finished_at < done.finished_at


@pytest.mark.anyio
async def test_long_jobs_are_served_in_the_order_in_which_they_came(service):
    ids = [await service.submit(f"{number} {LONG}", wake=False) for number in range(3)]
    service.start_worker(SECOND)
    jobs = await service.finish_all(ids)
    assert [job.attempt for job in jobs] == [1, 1, 1]
    for earlier, later in pairwise(jobs):
        assert earlier.finished_at <= later.started_at


@pytest.mark.anyio
async def test_a_job_that_turns_out_too_large_waits_unharmed_and_is_not_claimed_again_and_again(service):
    """The store guesses by bytes. This one's state has twice as many tokens, once it is JSON."""
    worker = service.start_worker(f"{SECOND}&beside_tokens=400")
    await service.ready()
    long = await service.submit(LONG)
    await service.running(long)
    large = await service.submit('"' * 1_000)
    short = await service.submit("short")
    early, late, done = await service.finish_all([short, large, long])
    assert early.finished_at < done.finished_at <= late.started_at
    assert [(job.status, job.attempt) for job in (early, late, done)] == [("succeeded", 1)] * 3
    assert len(await worker.events("job.too_large_beside")) == 1


@pytest.mark.anyio
async def test_short_jobs_in_one_pass_are_not_overtaken_by_later_ones(service):
    ids = await service.submit_many((f"early {n}" for n in range(20)), wake=False)
    service.start_worker("state_ms=30&yield_ms=5")
    await service.ready()
    await service.running(ids[0])
    late = await service.finish(await service.submit("late"))
    early = await service.finish_all(ids)
    assert max(job.finished_at for job in early) <= late.started_at


@pytest.mark.anyio
async def test_an_offline_turn_of_many_middle_sized_states_lets_short_work_overtake(service):
    ids = [await service.submit(f"{n} " + "x" * 6_000, lane="offline", wake=False) for n in range(4)]
    service.start_worker("ktoken_ms=500&yield_ms=5")  # each takes 0.75 s, none is longer than what may pass
    await service.ready()
    await service.running(ids[0])
    short = await service.finish(await service.submit("short"))
    offline = [await service.jobs.get(job_id, "me") for job_id in ids]
    assert [job.status for job in offline if job.started_at][-1] == "running"
    assert "succeeded" not in {job.status for job in offline}, "it waited for the end of a pass"
    done = await service.finish_all(ids)
    assert {(job.status, job.attempt) for job in (short, *done)} == {("succeeded", 1)}


@pytest.mark.anyio
async def test_short_jobs_of_a_turn_do_not_wait_for_a_long_one_of_the_same_turn(service):
    long, short = await service.submit_many([LONG, "short"], wake=False)
    service.start_worker(SECOND)
    first, last = await service.finish_all([short, long])
    assert first.started_at == last.started_at, "not one turn"
    assert last.finished_at - first.finished_at > 0.5


@pytest.fixture
def roomy(tiny_checkpoint, monkeypatch):
    """The real engine; a pass of a thousand rows is long, and has some hundred steps."""
    monkeypatch.setattr(engine_module, "LONG_ROWS", 1000)
    monkeypatch.setattr(capacity, "MLP_ROWS", 100)
    return DecisionEngine.load(str(tiny_checkpoint), device="cpu", state_cache_bytes=138_000_000)


@pytest.mark.anyio
async def test_the_answers_of_a_long_job_keep_their_bits_whoever_overtook(service, roomy, monkeypatch):
    monkeypatch.setattr(yields_module, "LOOK_EVERY_S", 0)
    monkeypatch.setattr(yields_module, "LONG_SHARE", 0)
    settings = service.settings.model_copy(update={"max_batch_tokens": 1_000})
    runner = TurnRunner(TurnStore(service.redis, settings, "w"), roomy, settings, lambda _lane: None)
    state, results, jobs = "the customer was charged twice for an order " * 120, [], []
    for company in (0, 12):
        long = await service.submit(state, questions=3, wake=False)
        short = [await service.submit(f"they refund {company} {n}", wake=False) for n in range(company)]
        for key in roomy.cached_state_keys():
            roomy.cache.forget(key)
        runner.run()
        jobs = await service.finish_all([long, *short], 1)
        results.append(json.loads(await service.jobs.result(long, "me")))
    assert results[0] == results[1]
    long, *short = jobs
    assert all(long.started_at <= job.started_at <= job.finished_at <= long.finished_at for job in short)
    assert {job.attempt for job in jobs} == {1}


@pytest.mark.anyio
async def test_a_running_job_tells_the_share_of_its_work_and_the_time_that_is_left(service):
    service.start_worker("ktoken_ms=200&yield_ms=5")  # LONG takes two seconds
    await service.ready()
    long = await service.submit(LONG)
    seen = [job async for job in service.jobs.watch(long, "me")]
    told = [job for job in seen if job.status == "running" and job.progress.eta_s is not None]
    shares = [job.progress.fraction for job in told]
    assert len(set(shares)) >= 2
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1
    assert told[0].progress.eta_s > 0
    assert all(job.progress.eta_s >= 0 for job in told)  # in tenths: none may be left of the last
    assert (seen[-1].progress.fraction, seen[-1].progress.eta_s) == (1, None)
    assert len(told) < 40, "a few times a second"


@pytest.mark.anyio
async def test_the_event_stream_tells_a_share_that_grows_with_time_and_the_time_that_is_left(
    service, serving
):
    service.start_worker("ktoken_ms=300&yield_ms=5")  # LONG takes three seconds
    await service.ready()
    body = {"model": "jev-latest", "state": LONG, "questions": {"q": {"type": "noul", "instructions": "x"}}}
    with serving(create_app(service.settings)) as url:
        async with AsyncClient(url) as client:
            job = await client.submit_body(body)
            told = [
                (time.monotonic(), event.data["fraction"], event.data["eta_s"])
                async for event in client.events(job.id)
                if event.name == "progress" and "eta_s" in event.data
            ]
    shares = [share for _, share, _ in told]
    assert len(set(shares)) >= 2
    assert 0 < shares[0] < shares[-1] < 1
    assert shares == sorted(shares)
    (began, first, _), (ended, last, _) = told[0], told[-1]
    for now, share, eta_s in told:
        line = first + (last - first) * (now - began) / (ended - began)
        assert share == pytest.approx(line, abs=0.35)
        assert eta_s >= 0  # in tenths: none may be left of the last
    assert told[0][2] > 0
