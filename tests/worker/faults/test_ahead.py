"""Faults while one turn runs and the next is claimed: nothing is lost or ended twice, the next is charged nothing."""

import asyncio
import os
import signal

import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.faults]

SLOW = "fake:sleep=3"
IN_TIME_S = 90


async def one_ahead(service, state=SLOW, **changes):
    """A worker in a pass that it thought would be short, with the next turn claimed; the worker and both jobs' ids."""
    worker = service.start_worker("question_ms=1000", **changes)
    await service.ready()
    await service.finish(
        await service.submit("f" * len(state))
    )  # of this size; now it knows how long that takes
    await service.settled()
    running = await service.submit(state)
    await service.running(running)
    following = await service.submit("following")  # and within a second, or it is too late to be claimed
    async with asyncio.timeout(IN_TIME_S):
        while (await service.jobs.get(following, "me")).status == "queued":
            await asyncio.sleep(0.01)
            if (await service.jobs.get(running, "me")).done:
                raise AssertionError("nothing was claimed ahead")
    job = await service.jobs.get(following, "me")
    assert (job.status, job.progress.stage) == ("running", "preparing")
    return worker, running, following


async def attempts(service, *ids):
    jobs = await service.finish_all(ids)
    await service.settled()
    assert await service.finished() == {"succeeded": 3}
    return [job.attempt for job in jobs]


async def test_the_next_turn_follows(service):
    _, running, following = await one_ahead(service)
    assert await attempts(service, running, following) == [1, 1]


@pytest.mark.parametrize("killed", ["child", "machine"])
async def test_what_kills_a_process_in_a_pass_costs_the_next_turn_no_attempt(service, killed):
    worker, running, following = await one_ahead(service)
    if killed == "child":
        os.kill(service.child(worker), signal.SIGKILL)
    else:
        worker.kill()
        service.start_worker()
    assert await attempts(service, running, following) == [2, 1]


async def test_a_worker_stalled_past_both_leases_ends_neither_job_again(service):
    stalled, running, following = await one_ahead(service)
    os.killpg(stalled.pid, signal.SIGSTOP)
    service.start_worker()
    assert await attempts(service, running, following) == [2, 1]
    os.killpg(stalled.pid, signal.SIGCONT)
    after = await service.finish(await service.submit("after"))
    assert after.status == "succeeded"
    await service.settled()
    assert await service.finished() == {"succeeded": 4}


async def test_a_device_that_dies_costs_the_next_turn_no_attempt(service):
    _, running, following = await one_ahead(service, "fake:sleep=1 fake:device-error")
    jobs = await service.finish_all([running, following])
    assert [(job.status, job.attempt) for job in jobs] == [("failed", 3), ("succeeded", 1)]


async def test_a_worker_that_is_told_to_stop_gives_the_next_turn_back(service):
    worker, running, following = await one_ahead(service)
    worker.signal(signal.SIGTERM)
    await asyncio.to_thread(worker.wait)
    jobs = [await service.jobs.get(job_id, "me") for job_id in (running, following)]
    assert [(job.status, job.attempt) for job in jobs] == [("succeeded", 1), ("queued", 0)]
    service.start_worker()
    assert await attempts(service, running, following) == [1, 1]


async def test_a_job_that_is_canceled_while_it_is_next_is_not_decided(service):
    _, running, following = await one_ahead(service)
    await service.jobs.cancel(following, "me")
    jobs = await service.finish_all([running, following])
    await service.settled()
    assert [job.status for job in jobs] == ["succeeded", "canceled"]
    assert len(service.passes()) == 2
