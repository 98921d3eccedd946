"""A turn that is claimed while its worker's pass still runs: what it may hold, and whom its loss is charged to."""

import pytest

pytestmark = pytest.mark.anyio


@pytest.mark.sabotage("claim", "redis.call('HSET', K('lease', lease), 'waits', '1')", "")
@pytest.mark.sabotage("progress", "redis.call('HDEL', K('lease', ARGV[1]), 'waits')", "")
async def test_it_is_charged_only_once_it_runs(table):
    job_id, worker = await table.submit("a"), table.worker()
    for told, attempt in ((False, 0), (True, 1)):
        turn = worker.claim(1, ahead=True)
        assert [job.id for job in turn.jobs] == [job_id]
        if told:
            assert worker.progress(turn.lease, "deciding", [job_id]) == {job_id}
        worker.free(turn.lease, "lost")
        assert (await table.jobs.get(job_id, "me")).attempt == attempt


@pytest.mark.sabotage("claim", "crew.idle > 0 or", "")
@pytest.mark.sabotage("claim", "(ready and one ~= worker and not crew.busy[one])", "ready")
async def test_it_takes_nothing_that_an_idle_worker_could_take_now(table):
    worker, other = table.worker("worker-1"), table.worker("other")
    for one in (worker, other):
        one.publish({"load": "loaded", "lanes": "interactive,offline"})
    await table.submit("first")
    running = worker.claim(1)
    await table.submit("second")
    assert not worker.claim(1, ahead=True).jobs
    taken = other.claim(1)
    await table.submit("third")
    assert len(worker.claim(1, ahead=True).jobs) == 1, "the other one is busy now"
    assert [len(turn.jobs) for turn in (running, taken)] == [1, 1]


async def test_a_worker_that_loads_is_not_waited_for(table):
    worker, other = table.worker("worker-1"), table.worker("other")
    worker.publish({"load": "loaded"})
    other.publish({"load": "loading"})
    await table.submit("a")
    assert len(worker.claim(1, ahead=True).jobs) == 1


@pytest.mark.sabotage("claim", "or order[1] ~= 'interactive'", "")
async def test_it_takes_no_offline_work_and_nothing_before_such_that_is_due(table, monkeypatch):
    worker = table.worker()
    await table.submit("offline", lane="offline")
    assert not worker.claim(1, ahead=True).jobs
    await table.submit("interactive")
    assert len(worker.claim(1, ahead=True).jobs) == 1
    monkeypatch.setattr("d3serve.store.turns.OFFLINE_PATIENCE_MS", -1)
    await table.submit("another")
    table.redis.hset(table.key("pace"), "beside", 10**6)
    assert not worker.claim(1, ahead=True).jobs, "the offline job has waited too long: it is next"
    assert worker.claim(1).jobs[0].asked_lane == "offline"


@pytest.mark.sabotage("claim", "ipairs(small and {} or LANES)", "ipairs(LANES)")
async def test_a_wake_up_that_is_out_stays_out(table, make_request):
    assert (await table.jobs.submit(make_request("a"), tenant="me")).wake
    table.worker().claim(1, ahead=True)
    assert not (await table.jobs.submit(make_request("b"), tenant="me")).wake


@pytest.mark.sabotage("claim", "elseif not suspect or (jobs == 0 and not small) then", "else")
async def test_it_takes_no_job_that_may_have_killed_a_worker(table):
    job_id, worker = await table.submit("a"), table.worker()
    worker.free(worker.claim(1).lease, "lost")
    assert not worker.claim(1, ahead=True).jobs
    assert [job.id for job in worker.claim(1).jobs] == [job_id]
