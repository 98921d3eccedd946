"""What is counted for /metrics is counted in the step in which it happens: once, whole, and under its own bound."""

import time
from collections import Counter

import pytest

from d3serve.schemas import JobError
from d3serve.store.tally import LAST_POWER, Times
from d3serve.store.turns import Success

pytestmark = pytest.mark.anyio
SETTLED = ("pending", "delivered", "", "tries", "[]")


async def answered(table, make_response, *, lane=None, pass_ms=5.0, tokenize_ms=1.5):
    """One job that was claimed and has its answer; committed twice, as after a lost connection."""
    job_id = await table.submit("a state", lane=lane)
    worker = table.worker()
    turn = worker.claim(1)
    success = Success(job_id, make_response(), pass_ms, tokenize_ms)
    assert worker.succeed_all(turn.lease, [success], "") == [True]
    assert worker.succeed_all(turn.lease, [success], "") == [True]
    worker.free(turn.lease, "back")
    return job_id


@pytest.mark.sabotage("commit", "observe(what, j.lane, ms)", "observe(what, 'interactive', ms)")
@pytest.mark.sabotage("commit", "elseif not open then", "elseif false then")
async def test_a_job_counts_its_times_once_and_in_its_lane(table, make_response):
    await answered(table, make_response, lane="offline")
    times = (await table.jobs.tally()).times
    assert times.keys() == {"queue", "tokenize", "pass", "total"}
    assert {lane for of_lanes in times.values() for lane in of_lanes} == {"offline"}
    assert {of_lanes["offline"].by_power.total() for of_lanes in times.values()} == {1}
    assert times["pass"]["offline"].sum_s == 0.005
    assert times["tokenize"]["offline"].sum_s == 0.0015


@pytest.mark.sabotage("commit", "share == 0.5 and power - 1 or power", "power")
@pytest.mark.sabotage("commit", "math.max(0, ms), 29", "ms, 29")
@pytest.mark.sabotage("commit", "math.min(last, ", "math.max(0, ")
async def test_a_time_stands_under_the_least_bound_that_it_does_not_exceed(table, make_response):
    times = {
        -5: 0,
        0: 0,
        0.2: 0,
        1: 0,
        1.1: 1,
        2: 1,
        2.1: 2,
        4: 2,
        1024: 10,
        1025: 11,
        2**LAST_POWER: LAST_POWER,
    }
    times[2**40] = LAST_POWER + 1
    for ms in times:
        await answered(table, make_response, pass_ms=ms)
    found = (await table.jobs.tally()).times["pass"]["interactive"]
    assert found.by_power == Counter(times.values())
    assert found.sum_s == pytest.approx(sum(max(0, ms) for ms in times) / 1000)


async def test_a_job_that_fails_counts_its_wait_and_its_total_alone(table):
    job_id = await table.submit("a state")
    worker = table.worker()
    turn = worker.claim(1)
    assert worker.fail(turn.lease, job_id, JobError(code="internal_error", message="m"))
    assert (await table.jobs.tally()).times.keys() == {"queue", "total"}


@pytest.mark.sabotage("reap", "tally('leases:reaped')", "")
@pytest.mark.sabotage("reap", "tally(lost and 'attempts:lost' or 'attempts:returned')", "")
async def test_what_a_dead_worker_had_counts_as_a_reaped_lease_and_lost_attempts(table):
    for n in range(2):
        await table.submit(f"state {n}")
    worker = table.worker()
    worker.lease_s = 0.01
    assert len(worker.claim(1).jobs) == 2
    deadline = time.monotonic() + 30
    while not worker.reap().leases:
        assert time.monotonic() < deadline
    worker.free(worker.claim(1).lease, "back")
    counts = (await table.jobs.tally()).counts
    assert counts["leases"] == {"reaped": 1}
    assert counts["attempts"]["lost"] == 2
    assert counts["attempts"]["begun"] - counts["attempts"]["returned"] == 2


@pytest.mark.sabotage("hook_settle", "observe('webhook', state, now_ms() - created)", "")
async def test_a_webhook_counts_while_it_waits_and_then_its_age(table, make_request, make_response):
    await table.jobs.submit(make_request(webhook={"url": "https://example.com/"}), tenant="me")
    worker = table.worker()
    turn = worker.claim(1)
    worker.succeed(turn.lease, turn.jobs[0].id, make_response())
    waiting = await table.jobs.tally()
    assert waiting.webhooks_pending == 1
    assert 0 <= waiting.webhooks_late_s < 60
    [delivery] = table.redis.zrange(table.key("outbox", "me"), 0, -1)
    await table.jobs._table.run("hook_settle", delivery, *SETTLED)
    settled = await table.jobs.tally()
    assert settled.webhooks_pending == 0
    assert settled.times["webhook"]["delivered"].by_power.total() == 1


def test_buckets_add_up_as_prometheus_wants_them():
    times = Times()
    times.by_power.update({0: 2, 3: 1, LAST_POWER + 1: 4})
    buckets = dict(times.buckets())
    assert (buckets["0.001"], buckets["0.004"], buckets["0.008"]) == (2, 2, 3)
    assert (buckets["268435.456"], buckets["+Inf"]) == (3, 7)
