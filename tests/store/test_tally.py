"""What is counted for /metrics is counted once, whole, and under its own bound."""

import time
from collections import Counter

import pytest

from d3serve.schemas import JobError
from d3serve.store import lua
from d3serve.store.tally import BOUNDS_MS, Counted, Times, observe
from d3serve.store.turns import Success

pytestmark = pytest.mark.anyio
SETTLED = ("pending", "delivered", "", "tries", "[]")
LAST = len(BOUNDS_MS) - 1
UNDER = {
    -5: 0, 0: 0, 1: 0, 1.1: 1, 2.5: 1, 25: 4, 25.1: 5, 1000: 9, 1001: 10, BOUNDS_MS[LAST]: LAST, 2**40: LAST + 1,
}  # fmt: skip
BY_BOUND = tuple(list(UNDER.values()).count(n) for n in range(LAST + 2))
SUM_S = sum(round(1000 * max(0, ms)) for ms in UNDER) / 1e6


@pytest.mark.sabotage("free", "if back >= 0 then -- once", "if true then -- once")
@pytest.mark.sabotage("free", "tally(ARGV[i], ARGV[i + 1])", "")
@pytest.mark.sabotage("free", "local after = 6 + ARGV[5]", "local after = 6")
async def test_what_a_turn_spent_counts_once_when_it_is_freed(table):
    await table.submit("a state")
    worker = table.worker()
    turn = worker.claim(1)
    observe(turn.spent, "offline", {"queue": 7, "tokenize": None, "pass": 5.0, "total": 12.4})
    observe(turn.spent, "offline", {"pass": 1.5})
    assert (await table.jobs.tally()).times == {}
    for _ in range(2):  # as after a lost connection
        worker.free(turn.lease, "back", [turn.jobs[0].group], turn.spent)
    times = (await table.jobs.tally()).times
    assert {lane for of_lanes in times.values() for lane in of_lanes} == {"offline"}
    found = {what: sum(of_lanes["offline"].by_bound) for what, of_lanes in times.items()}
    assert found == {"queue": 1, "pass": 2, "total": 1}
    assert (times["pass"]["offline"].sum_s, times["total"]["offline"].sum_s) == (0.0065, 0.0124)
    assert table.redis.exists(table.key("warm", turn.jobs[0].group))


async def test_an_end_says_how_long_the_job_took_also_when_it_is_said_again(table, make_response):
    worker = table.worker()
    for end in (
        lambda lease, job: worker.succeed_all(lease, [Success(job, make_response(), 5.0)], "")[0],
        lambda lease, job: worker.fail(lease, job, JobError(code="internal_error", message="m")),
    ):
        job_id = await table.submit("a state")
        turn = worker.claim(1)
        [job] = turn.jobs
        row = table.redis.hgetall(table.key("job", job_id))
        assert job.waited_ms == int(row["started"]) - int(row["created"])
        took_ms = end(turn.lease, job_id)
        row = table.redis.hgetall(table.key("job", job_id))
        assert took_ms == max(1, int(row["finished"]) - int(row["created"])) == end(turn.lease, job_id)
        worker.free(turn.lease, "back")


def test_a_time_stands_under_the_least_bound_that_it_does_not_exceed():
    spent = Counter[str]()
    for ms in UNDER:
        observe(spent, "offline", {"pass": ms})
    found = Counted.of({name: str(count) for name, count in spent.items()}, 0, 0.0).times["pass"]["offline"]
    assert (found.by_bound, found.sum_s) == (BY_BOUND, SUM_S)


@pytest.mark.sabotage("hook_settle", "time > BOUNDS_MS", "time >= BOUNDS_MS")
@pytest.mark.sabotage("hook_settle", "math.max(0, ms)", "ms")
@pytest.mark.sabotage("hook_settle", "(BOUNDS_MS[under] or 'inf')", "BOUNDS_MS[under]")
async def test_scripts_find_the_same_bounds(table):
    functions = lua.script("hook_settle").partition("-- The state lives")[0]
    for ms in UNDER:
        script = f"{functions}\nobserve('webhook', 'dead', tonumber(ARGV[1]))"
        table.redis.eval(script, 1, table.key("job").removesuffix("job:"), ms)
    found = (await table.jobs.tally()).times["webhook"]["dead"]
    assert (found.by_bound, found.sum_s) == (BY_BOUND, SUM_S)


@pytest.mark.sabotage("reap", "tally('leases:reaped', freed)", "")
@pytest.mark.sabotage("reap", "tally(lost and 'attempts:lost' or 'attempts:returned', 1)", "")
@pytest.mark.sabotage("claim", "tally('attempts:begun', jobs)", "")
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


@pytest.mark.sabotage("more", "tally('attempts:begun', #taken)", "")
async def test_who_joins_a_turn_late_begins_an_attempt_too(table):
    worker = table.worker()
    await table.submit("a state")
    turn = worker.claim(1)
    await table.submit("a state")
    assert len(worker.more(turn.lease)) == 1
    assert (await table.jobs.tally()).counts["attempts"]["begun"] == 2


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
    assert sum(settled.times["webhook"]["delivered"].by_bound) == 1


def test_buckets_add_up_as_prometheus_wants_them():
    counts = [0] * (len(BOUNDS_MS) + 1)
    counts[0], counts[4], counts[-1] = 2, 1, 4
    buckets = dict(Times(tuple(counts)).buckets())
    assert (buckets["0.001"], buckets["0.01"], buckets["0.025"]) == (2, 2, 3)
    assert (buckets["259200.0"], buckets["+Inf"]) == (3, 7)
