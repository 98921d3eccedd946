"""How long things are kept: whatever an ended job leaves behind ends too, and nothing that is needed does."""

import pytest

from d3serve.errors import JobExpired, JobNotFinished, JobNotFound
from d3serve.schemas import JobError
from d3serve.store.encode import TOMBSTONE_TTL_S

pytestmark = pytest.mark.anyio
BROKEN = JobError(code="internal_error", message="broken")
# Kept for as long as there are tenants, lanes and workers; each is bounded by what lives.
FOR_GOOD = {"jobs", "finished", "work", "load", "workers", "ring", "pace", "kept", "holds", "erased", "tally"}


def kept_for_ever(table):
    """Keys without an end, by the first word of their names."""
    prefix = table.key("job")[: -len("job:")]
    names = {name: name.removeprefix(prefix).split(":")[0] for name in table.redis.keys("*")}
    return {word for name, word in names.items() if table.redis.ttl(name) == -1}


async def fail(table, job_id):
    """Claim all that waits and fail one job."""
    worker = table.worker()
    turn = worker.claim(1)
    assert worker.fail(turn.lease, job_id, BROKEN)
    worker.free(turn.lease, "back")


class TestEnds:
    @pytest.mark.sabotage(
        "commit",
        "redis.call('SET', K('res', id), text, 'PX', j.ttl_ms)",
        "redis.call('SET', K('res', id), text)",
    )
    @pytest.mark.sabotage("commit", "redis.call('PEXPIRE', job, j.ttl_ms)", "")
    @pytest.mark.sabotage("commit", "redis.call('PEXPIRE', K('body', id), int(input_ms))", "")
    @pytest.mark.sabotage("commit", "redis.call('PEXPIREAT', st, int(tonumber(last[2])))", "")
    @pytest.mark.sabotage("commit", "redis.call('PEXPIREAT', need, int(tonumber(last[2])))", "")
    @pytest.mark.sabotage("commit", "tenant, 'PX', int(ttl_ms))", "tenant)")
    @pytest.mark.sabotage("submit", "id .. ' ' .. print, 'PX', idem_ttl)", "id .. ' ' .. print)")
    @pytest.mark.sabotage("submit", "'1', 'NX', 'PX', WAKE_MS)", "'1', 'NX')")
    @pytest.mark.sabotage("free", "ARGV[3], 'PX', ARGV[4])", "ARGV[3])")
    @pytest.mark.sabotage("rate", "redis.call('PEXPIRE', key, ARGV[2])", "")
    @pytest.mark.sabotage("tell", "redis.call('PEXPIRE', K('worker', worker), ttl_ms)", "")
    async def test_nothing_of_ended_jobs_stays_for_ever(self, table, make_request, make_response):
        worker = table.worker()
        worker.publish({"load": "loaded"})
        await table.jobs.count_request("key", 60)
        good, bad = await table.submit("good"), await table.submit("bad", timeout_s=9)
        await table.jobs.submit(make_request("good"), tenant="me", idempotency_key="k")
        turn = worker.claim(1)
        for job in turn.jobs:
            if job.id == bad:
                worker.fail(turn.lease, bad, BROKEN)
            else:
                worker.succeed(turn.lease, job.id, make_response())
        worker.free(turn.lease, "back", [turn.jobs[0].group])
        await table.jobs.cancel(await table.submit("canceled"), "me")
        await table.jobs.delete(await table.submit("deleted"), "me")
        assert (await table.jobs.get(good, "me")).status == "succeeded"
        assert kept_for_ever(table) <= FOR_GOOD

    @pytest.mark.sabotage(
        "commit", "bury(id, j.tenant, expires, j.ttl_ms + j.tomb_ms)", "bury(id, j.tenant, expires, j.ttl_ms)"
    )
    async def test_a_tombstone_stands_as_long_as_told_after_its_job_is_gone(self, table):
        job_id = await table.submit(result_ttl_s=100)
        await fail(table, job_id)
        left_s = table.redis.ttl(table.key("gone", job_id))
        assert left_s == pytest.approx(100 + TOMBSTONE_TTL_S, abs=5)

    @pytest.mark.sabotage("rate", "if count == 1 then", "if true then")
    async def test_a_window_of_requests_ends_however_many_come(self, table):
        counts = []
        for _ in range(3):
            counts.append((await table.jobs.count_request("key", 60))[0])
            table.redis.pexpire(table.key("rate", "key"), 30_000)  # half of it passes
        assert counts == [1, 2, 3]
        assert (await table.jobs.count_request("key", 60))[1] <= 30
        assert (await table.jobs.count_request("another", 60))[0] == 1

    @pytest.mark.sabotage("tell", "redis.call('ZREMRANGEBYSCORE', K('workers'), '-inf', int(now))", "")
    async def test_workers_that_are_long_gone_leave_the_list(self, table):
        table.worker("gone").publish({"pid": 1})
        table.redis.zadd(table.key("workers"), {"gone": 1})
        table.worker("here").publish({"pid": 2})
        assert table.redis.zrange(table.key("workers"), 0, -1) == ["here"]


class TestStays:
    @pytest.mark.sabotage("submit", "redis.call('PERSIST', K('st', group))", "")
    async def test_a_state_kept_for_a_retry_only_is_kept_for_good_when_a_new_job_needs_it(self, table):
        await fail(table, await table.submit("s", result_ttl_s=100))
        [state] = table.redis.keys(table.key("st", "*"))
        assert table.redis.ttl(state) > 0
        await table.submit("s")
        assert table.redis.ttl(state) == -1

    @pytest.mark.sabotage("commit", "elseif tonumber(last[2]) < FOREVER then", "else")
    async def test_a_failure_does_not_end_the_state_of_those_that_wait(self, table):
        first = await table.submit("s", result_ttl_s=100)
        await table.submit("s")
        await fail(table, first)
        [state] = table.redis.keys(table.key("st", "*"))
        assert -1 <= table.redis.ttl(state) < 0

    @pytest.mark.sabotage("retry", "redis.call('PERSIST', job)", "")
    @pytest.mark.sabotage("retry", "redis.call('PERSIST', K('body', id))", "")
    @pytest.mark.sabotage("retry", "redis.call('PERSIST', K('st', j.group))", "")
    @pytest.mark.sabotage("retry", "redis.call('PERSIST', K('need', j.group))", "")
    @pytest.mark.sabotage("retry", "redis.call('DEL', K('gone', id))", "")
    async def test_all_that_a_retried_job_needs_stays_and_its_tombstone_goes(self, table):
        job_id = await table.submit(result_ttl_s=100)
        await fail(table, job_id)
        await table.jobs.retry(job_id, "me")
        assert kept_for_ever(table) >= {"job", "body", "st", "need"}
        assert not table.redis.exists(table.key("gone", job_id))

    @pytest.mark.sabotage("retry", "'losses', 0, ", "")
    @pytest.mark.sabotage("retry", "'deadline', 0, ", "")
    async def test_a_retry_is_a_new_beginning(self, table):
        job_id = await table.submit(expires_in_s=1)
        table.redis.hset(table.key("job", job_id), mapping={"losses": 2, "deadline": 1})
        table.worker().reap()
        assert not table.worker().claim(1).jobs
        await table.jobs.retry(job_id, "me")
        worker = table.worker()
        worker.free(worker.claim(1).lease, "lost")
        assert (await table.jobs.get(job_id, "me")).status == "queued"

    @pytest.mark.sabotage("retry", "K('st', j.group)) < 2", "K('st', j.group)) < 1")
    @pytest.mark.parametrize("lost", ["body", "st"])
    async def test_a_job_whose_input_is_gone_cannot_be_retried(self, table, lost):
        job_id = await table.submit()
        await fail(table, job_id)
        table.redis.delete(*table.redis.keys(table.key(lost, "*")))  # what its TTL does
        with pytest.raises(JobExpired, match="input"):
            await table.jobs.retry(job_id, "me")

    @pytest.mark.sabotage(
        "free",
        "if tonumber(j.deadline) > 0 and now >= tonumber(j.deadline) then\n    finish",
        "if false then\n    finish",
    )
    async def test_a_job_that_comes_back_too_late_to_start_again_expires(self, table):
        job_id = await table.submit(expires_in_s=60)
        worker = table.worker()
        lease = worker.claim(1).lease
        table.redis.hset(table.key("job", job_id), "deadline", 1)
        assert worker.free(lease, "lost").ended == 1
        assert (await table.jobs.get(job_id, "me")).status == "expired"

    @pytest.mark.sabotage("free", "  redis.call('ZREM', K('deadlines'), id)\n  if lost", "  if lost")
    async def test_the_time_to_run_is_not_counted_while_a_job_waits_again(self, table):
        await table.submit(timeout_s=60)
        worker = table.worker()
        worker.free(worker.claim(1).lease, "back")
        assert table.redis.zcard(table.key("deadlines")) == 0


class TestTenants:
    """Another tenant's call is not only answered as if the job did not exist: it does nothing to it."""

    @pytest.mark.sabotage("cancel", "j.tenant ~= ARGV[2]", "not j.tenant")
    async def test_cancel(self, table):
        job_id = await table.submit()
        with pytest.raises(JobNotFound):
            await table.jobs.cancel(job_id, "you")
        assert (await table.jobs.get(job_id, "me")).status == "queued"

    @pytest.mark.sabotage("retry", "j.tenant ~= ARGV[2]", "not j.tenant")
    async def test_retry(self, table):
        job_id = await table.submit()
        await fail(table, job_id)
        with pytest.raises(JobNotFound):
            await table.jobs.retry(job_id, "you")
        assert (await table.jobs.get(job_id, "me")).status == "failed"

    @pytest.mark.sabotage("delete", "j.tenant ~= ARGV[2]", "not j.tenant")
    async def test_delete(self, table):
        job_id = await table.submit()
        with pytest.raises((JobNotFound, JobNotFinished)):
            await table.jobs.delete(job_id, "you")
        assert (await table.jobs.get(job_id, "me")).status == "queued"
