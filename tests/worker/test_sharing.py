"""Real workers share what waits: among tenants, and among themselves."""

import asyncio
from collections import Counter

import pytest

pytestmark = pytest.mark.anyio


async def test_a_tenants_backlog_leaves_another_its_turn(service):
    flood = [
        await service.submit(f"flood {number % 60}", tenant="flood", wake=False) for number in range(300)
    ]
    quiet = await service.submit("alone", tenant="quiet", wake=False)
    service.start_worker("state_ms=40&question_ms=1", max_batch_questions=20)
    await service.ready()
    await asyncio.to_thread(service.send_wake, "interactive")
    alone = await service.jobs.wait(quiet, "quiet", 60)
    crowd = await asyncio.gather(*(service.jobs.wait(job_id, "flood", 60) for job_id in flood))
    assert {job.status for job in (alone, *crowd)} == {"succeeded"}
    assert sum(job.finished_at <= alone.finished_at for job in crowd) < len(flood) / 3


async def test_idle_workers_take_their_share_of_a_burst(service):
    for _ in range(3):
        service.start_worker("state_ms=50")
    await service.ready(3)
    ids = await service.submit_many([f"s{number}" for number in range(60)])
    await service.finish_all(ids)
    states = Counter(one["pid"] for one in service.passes() for _ in one["fresh"])
    assert sum(states.values()) == 60
    assert max(states.values()) < 40, states
