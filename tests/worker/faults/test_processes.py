"""Processes that are killed, stalled, replaced or out of step: no job is lost, none is ended twice."""

import asyncio
import os
import random
import signal

import pytest

from d3serve.store import encode

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_forty_kills_in_three_thousand_jobs_lose_nothing(service, monkeypatch):
    """Each kill meets a turn that runs, and takes a whole worker or only its child, whichever chance picks."""
    # More attempts than kills: a job that was lost goes first, and on a slow machine most kills meet the same one.
    monkeypatch.setattr(encode, "MAX_ATTEMPTS", 50)
    ids = await service.submit_many(f"state {i % 300}" for i in range(3_000))
    for _ in range(2):
        service.start_worker("question_ms=4", max_batch_questions=16)
    await service.ready(2)
    chance = random.Random(7)  # noqa: S311 # chance, not secrecy
    for _ in range(40):
        await asyncio.sleep(chance.uniform(0.0, 0.2))
        worker, child = await service.at_work()
        if chance.random() < 0.5:
            os.kill(child, signal.SIGKILL)
        else:
            worker.kill()
            service.start_worker("question_ms=4", max_batch_questions=16)
    jobs = await service.finish_all(ids, 600)
    assert [job for job in jobs if job.status != "succeeded"] == []
    assert sum(job.attempt - 1 for job in jobs) >= 20, "the kills hit nobody"
    await service.settled()
    assert await service.finished() == {"succeeded": 3_000}
    assert not service.states_on_two_workers()


async def test_a_worker_stalled_past_its_lease_cannot_end_the_job_again(service):
    stalled = service.start_worker("state_ms=1000")
    await service.ready()
    job_id = await service.submit("s")
    await service.running(job_id)
    os.killpg(stalled.pid, signal.SIGSTOP)
    service.start_worker("state_ms=50")
    job = await service.finish(job_id)
    assert (job.status, job.attempt) == ("succeeded", 2)
    os.killpg(stalled.pid, signal.SIGCONT)
    [late] = await stalled.events("job.done")
    assert late["status"] == "refused"
    assert await service.finished() == {"succeeded": 1}
    assert (await service.jobs.get(job_id, "me")) == job


async def test_every_worker_in_turn_may_be_replaced_under_load(service):
    workers = [service.start_worker("question_ms=5", max_batch_questions=8) for _ in range(2)]
    await service.ready(2)
    ids = await service.submit_many(f"state {i % 60}" for i in range(300))
    for worker in workers:
        worker.signal(signal.SIGTERM)
        service.start_worker("question_ms=5", max_batch_questions=8)
        assert await asyncio.to_thread(worker.wait) == 0
    jobs = await service.finish_all(ids)
    assert {(job.status, job.attempt) for job in jobs} == {("succeeded", 1)}
    assert await service.finished() == {"succeeded": 300}


LATE = "import d3serve.wake.celery_app as c\nold = c.celery_config\n" + (
    "def short(settings):\n"
    "    new = old(settings)\n"
    "    new['broker_transport_options'] |= {'visibility_timeout': 1, 'unacked_restore_interval': 0.2}\n"
    "    return new\n"
    "c.celery_config = short\n"
)


async def test_a_job_longer_than_the_visibility_timeout_runs_once(service):
    for _ in range(2):
        service.start_worker("state_ms=6000", prelude=LATE)
    await service.ready(2)
    job = await service.finish(await service.submit("s"))
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert len(service.passes()) == service.prefills() == 1


@pytest.mark.parametrize("renews", [True, False], ids=["renewed", "sabotaged"])
async def test_a_job_longer_than_its_lease_runs_once_because_it_is_renewed(service, broken_site, renews):
    environ = {} if renews else broken_site(
        "import d3serve.store.turns as t\nt.TurnStore.renew = lambda self, lease: True\n"
    )  # fmt: skip
    for _ in range(2):
        service.start_worker("state_ms=7000", environ=environ)
    await service.ready(2)
    job = await service.finish(await service.submit("s"))
    await service.settled()
    assert (job.attempt == 1) == renews
    assert await service.finished() == {"succeeded": 1}


async def test_clocks_two_hours_apart_change_nothing(service, broken_site):
    skew = "import time\nreal = time.time\ntime.time = lambda: real() + {}\n"
    for seconds in (7_200, -7_200):
        folder = broken_site(skew.format(seconds))
        service.start_worker("state_ms=20", environ=folder, max_batch_questions=4)
    await service.ready(2)
    ids = await service.submit_many((f"state {i % 10}" for i in range(100)), expires_in_s=60, timeout_s=60)
    jobs = await service.finish_all(ids)
    assert {(job.status, job.attempt) for job in jobs} == {("succeeded", 1)}
    for job in jobs:
        assert job.created_at <= job.started_at <= job.finished_at < job.created_at + 60


@pytest.mark.parametrize("workers", [1, 2])
async def test_320_waiting_jobs_over_40_states_cost_40_prefills(service, workers):
    ids = await service.submit_many((f"state {i % 40}" for i in range(320)), wake=False)
    for _ in range(workers):
        service.start_worker("state_ms=20&question_ms=2", max_batch_questions=64)
    jobs = await service.finish_all(ids)
    assert {job.status for job in jobs} == {"succeeded"}
    assert service.prefills() == 40
    assert not service.states_on_two_workers()
    assert sum(not job.usage.state_cached for job in jobs) == 40


async def test_a_long_offline_turn_does_not_hold_up_short_jobs(service):
    for _ in range(2):
        service.start_worker("question_ms=20")
    await service.ready(2)
    long = await service.submit("fake:sleep=20", lane="offline")
    more = await service.submit("also fake:sleep=20", lane="offline")
    await service.running(long)
    await service.finish_all(await service.submit_many(f"short {i}" for i in range(20)))
    assert [(await service.jobs.get(i, "me")).status for i in (long, more)] == ["running", "queued"]


async def test_a_thousand_cancels_of_finished_jobs_change_nothing(service):
    service.start_worker()
    ids = await service.submit_many(f"state {i % 10}" for i in range(1_000))
    await service.finish_all(ids)
    for job_id in ids:
        assert (await service.jobs.cancel(job_id, "me")).status == "succeeded"
    assert (await service.finish(await service.submit("after"))).status == "succeeded"
    assert await service.finished() == {"succeeded": 1_001}


async def test_a_cancel_with_no_worker_alive_holds_when_one_comes(service):
    doomed = await service.submit_many(["a", "b"])
    kept = await service.submit("c")
    for job_id in doomed:
        await service.jobs.cancel(job_id, "me")
    service.start_worker()
    assert (await service.finish(kept)).status == "succeeded"
    assert [(await service.jobs.get(i, "me")).status for i in doomed] == ["canceled"] * 2
    assert service.prefills() == 1
