"""A worker that waits by itself is called by whoever brings work, in the same step; nobody else is woken then."""

import pytest

pytestmark = pytest.mark.anyio


def waits(worker, ms=60_000, *lanes):
    """What `wait_for_call` says first."""
    return worker._table.run("idle", worker.worker, ms, *(lanes or ("interactive", "offline")))


def calls(table, worker):
    return table.redis.lrange(table.key("call", worker.worker), 0, -1)


@pytest.mark.sabotage("submit", "    and not call_idle(lane, group)\n", "")
async def test_who_submits_calls_one_that_waits_and_need_wake_nobody(table, make_request):
    first, second = table.worker("first"), table.worker("second")
    for worker in (first, second):
        waits(worker)
    submitted = await table.jobs.submit(make_request("a"), tenant="me")
    assert not submitted.wake
    assert sorted([calls(table, first), calls(table, second)]) == [[], ["interactive"]]


@pytest.mark.sabotage("idle", "int(now_ms() + ms)", "'+inf'")
async def test_one_that_said_so_too_long_ago_is_not_called(table, make_request):
    worker = table.worker()
    waits(worker)
    for lane in ("interactive", "offline"):
        entries = table.redis.zrange(table.key("idle", lane), 0, -1, withscores=True)
        table.redis.zadd(table.key("idle", lane), {name: until - 60_001 for name, until in entries})
    assert (await table.jobs.submit(make_request("a"), tenant="me")).wake
    assert not calls(table, worker)


@pytest.mark.sabotage("claim", "  redis.call('ZREM', K('idle', lane), worker)\n", "")
@pytest.mark.sabotage("claim", "redis.call('DEL', K('call', worker))", "")
async def test_one_that_claims_waits_no_longer_and_has_heard_its_calls(table, make_request):
    worker = table.worker()
    waits(worker)
    await table.submit("a")
    waits(worker)  # it hears of it only later
    assert len(worker.claim(1).jobs) == 1
    assert not calls(table, worker)
    assert (await table.jobs.submit(make_request("b"), tenant="me")).wake


@pytest.mark.sabotage("submit", "  redis.call('ZREM', K('idle', 'offline'), worker)\n", "")
async def test_one_call_is_enough_for_one_worker(table, make_request):
    worker = table.worker()
    waits(worker)
    assert not (await table.jobs.submit(make_request("a"), tenant="me")).wake
    assert (await table.jobs.submit(make_request("b", lane="offline"), tenant="me")).wake


async def test_nobody_is_called_for_a_lane_that_it_does_not_serve(table, make_request):
    worker = table.worker()
    waits(worker, 60_000, "offline")
    assert (await table.jobs.submit(make_request("a"), tenant="me")).wake


@pytest.mark.sabotage("idle", "redis.call('LRANGE', K('call', worker), 0, -1)", "{}")
async def test_one_that_leaves_tells_what_it_was_called_for(table, make_request):
    worker = table.worker()
    waits(worker)
    await table.submit("a")
    assert worker.wait_no_longer() == ["interactive"]
    assert worker.wait_no_longer() == []
    waits(worker)
    assert worker.wait_no_longer() == []
    table.redis.delete(table.key("wake", "interactive"))
    assert (await table.jobs.submit(make_request("b"), tenant="me")).wake


@pytest.mark.sabotage("submit", "    and redis.call('LLEN', K('mq', lane)) == 0\n", "")
async def test_a_wake_up_that_nobody_has_taken_is_enough(table, make_request):
    table.redis.lpush(table.key("mq", "interactive"), "a wake-up")
    assert not (await table.jobs.submit(make_request("a"), tenant="me")).wake
    table.redis.delete(table.key("mq", "interactive"))
    assert (await table.jobs.submit(make_request("b"), tenant="me")).wake


@pytest.mark.sabotage("claim", "if not is_known() then", "if false then")
@pytest.mark.sabotage("claim", "redis.call('ZSCORE', K('workers'), worker) or 0) > now", "now) == now")
async def test_a_worker_that_nobody_knows_any_more_claims_nothing(table):
    worker = table.worker()
    await table.submit("a")
    worker.serve("a model", {"load": "loaded"})
    worker.serves = "a model"
    table.redis.zadd(table.key("workers"), {worker.worker: 1})  # it has not shown itself for long
    assert not worker.claim(1).known
    worker.retire()
    turn = worker.claim(1)
    assert (turn.known, turn.jobs) == (False, [])
    worker.serve("a model", {"load": "loaded"})
    turn = worker.claim(1)
    assert (turn.known, len(turn.jobs)) == (True, 1)


@pytest.mark.sabotage("submit", "wants_wake(group_lane, '1', group)", "wants_wake(group_lane)")
@pytest.mark.sabotage("submit", " or 0) >= now and holder", " or 0) > now + 9e9 and holder")
async def test_of_those_that_wait_the_holder_of_the_state_is_called(table, make_request, make_response):
    first, holder = table.worker("first"), table.worker("holder")
    await table.submit("a")
    turn = holder.claim(1)
    holder.succeed(turn.lease, turn.jobs[0].id, make_response())
    holder.free(turn.lease, "back", [turn.jobs[0].group])
    for worker in (first, holder):
        waits(worker, 60_000 if worker is first else 61_000)
    assert not (await table.jobs.submit(make_request("a"), tenant="me")).wake
    assert [calls(table, first), calls(table, holder)] == [[], ["interactive"]]
    waits(holder, 0)
    table.redis.delete(table.key("wake", "interactive"))
    assert not (await table.jobs.submit(make_request("a"), tenant="me")).wake
    assert calls(table, first) == ["interactive"], "another rather than nobody"
