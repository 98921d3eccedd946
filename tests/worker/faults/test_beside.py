"""Faults while a long pass waits for a short one: nothing is lost or ended twice, each fault charged to its own."""

import asyncio
import os
import signal

import pytest

from d3serve.store.encode import MAX_ATTEMPTS
from d3serve.store.turns import TurnStore

pytestmark = [pytest.mark.anyio, pytest.mark.faults]

LONG = "x" * 40_000
ENGINE = "ktoken_ms=400&yield_ms=5"  # LONG takes four seconds


async def beside(service, state, **options):
    """A worker that reads a long state and has let a short job pass, which runs; the worker and both jobs' ids."""
    worker = service.start_worker(ENGINE)
    await service.ready()
    long = await service.submit(LONG)
    await service.running(long)
    short = await service.submit(state, **options)
    await service.running(short)
    return worker, long, short


async def charged(service, long, short):
    """Both jobs' statuses and attempts, once both have ended, and nothing else has."""
    jobs = await service.finish_all([long, short])
    await service.settled()
    assert sum((await service.finished()).values()) == 2
    return [(job.status, job.attempt) for job in jobs]


@pytest.mark.parametrize("killed", ["child", "machine"])
async def test_what_kills_a_process_in_a_short_pass_costs_the_long_job_no_attempt(service, killed):
    worker, long, short = await beside(service, "fake:sleep=3")
    if killed == "child":
        os.kill(service.child(worker), signal.SIGKILL)
    else:
        worker.kill()
        service.start_worker(ENGINE)
    assert await charged(service, long, short) == [("succeeded", 1), ("succeeded", 2)]


async def test_a_worker_stalled_in_a_short_pass_past_both_leases_ends_neither_job_again(service):
    stalled, long, short = await beside(service, "fake:sleep=3")
    os.killpg(stalled.pid, signal.SIGSTOP)
    service.start_worker(ENGINE)
    assert await charged(service, long, short) == [("succeeded", 1), ("succeeded", 2)]
    os.killpg(stalled.pid, signal.SIGCONT)
    [late] = await stalled.events("job.done")
    assert late["status"] == "refused"
    after = await service.finish(await service.submit("after"))
    assert after.status == "succeeded"
    assert await service.finished() == {"succeeded": 3}


async def test_a_device_that_dies_in_a_short_pass_costs_the_long_job_no_attempt(service):
    service.start_worker(ENGINE)
    await service.ready()
    long = await service.submit(LONG)
    await service.running(long)
    short = await service.submit("fake:device-error")
    assert await charged(service, long, short) == [("succeeded", 1), ("failed", MAX_ATTEMPTS)]


@pytest.mark.parametrize(
    ("state", "code"), [("fake:oom", "out_of_device_memory"), ("fake:nan", "invalid_model_output"),
                        ("fake:crash", "internal_error")],
)  # fmt: skip
async def test_a_short_pass_that_fails_leaves_the_long_one_alone(service, state, code):
    service.start_worker(ENGINE)
    await service.ready()
    long = await service.submit(LONG)
    await service.running(long)
    short = await service.submit(state)
    assert await charged(service, long, short) == [("succeeded", 1), ("failed", 1)]
    assert (await service.jobs.get(short, "me")).error.code == code
    assert len([a_pass for a_pass in service.passes() if a_pass["fresh"]]) <= 2, "the long state is read once"


async def test_a_short_job_that_is_canceled_beside_a_long_one_ends_alone(service):
    _, long, short = await beside(service, "fake:sleep=3")
    await service.jobs.cancel(short, "me")
    assert await charged(service, long, short) == [("succeeded", 1), ("canceled", 1)]


async def test_a_long_job_that_is_canceled_while_it_waits_ends_after_the_short_one(service):
    _, long, short = await beside(service, "fake:sleep=3")
    await service.jobs.cancel(long, "me")
    assert await charged(service, long, short) == [("canceled", 1), ("succeeded", 1)]
    assert len(service.passes()) == 1, "the long pass did not end"


def lose(service, job_id):
    """End the lease that holds a job, as a sweep does when nobody has renewed it."""
    lease = service.redis.hget(service.key("job", job_id), "lease")
    TurnStore.open(service.settings, "sweeper").free(lease, "lost")


async def test_a_long_turn_that_loses_its_lease_while_it_waits_ends_and_its_job_is_read_again(service):
    worker, long, short = await beside(service, "fake:sleep=3")
    lose(service, long)
    assert await charged(service, long, short) == [("succeeded", 1), ("succeeded", 1)]
    assert len(service.passes()) == 2, "the long pass without a lease did not end"
    assert worker.alive()


async def test_a_short_turn_that_loses_its_lease_cannot_commit_and_costs_the_long_job_nothing(service):
    worker, long, short = await beside(service, "fake:sleep=3")
    lose(service, short)
    assert await charged(service, long, short) == [("succeeded", 1), ("succeeded", 2)]
    done = await worker.events("job.done", 3)
    assert [event["status"] for event in done if event["job_id"] == short] == ["refused", "succeeded"]


async def test_a_long_job_that_is_canceled_frees_the_device(service):
    service.start_worker("ktoken_ms=6000&yield_ms=20")  # LONG takes a minute
    await service.ready()
    long = await service.submit(LONG, lane="offline")
    await service.running(long)
    await service.jobs.cancel(long, "me")
    async with asyncio.timeout(30):  # or it would take the minute
        while service.redis.zcard(service.key("leases")):  # noqa: ASYNC110 # in Redis
            await asyncio.sleep(0.01)
    assert service.passes() == []
