"""The contract of the job table, continued: how jobs end."""

import itertools
import json

import pytest

from d3serve.errors import (
    AlreadySucceeded,
    JobExpired,
    JobNotFinished,
    JobNotFound,
)
from d3serve.schemas import JobError
from d3serve.store.turns import Success

pytestmark = pytest.mark.anyio
BROKEN = JobError(code="internal_error", message="broken")
TOO_LONG = JobError(code="max_tokens_exceeded", message="too long")


class TestCommit:
    async def test_result_status_ttl_and_tombstone_come_in_one_step(self, table, make_response):
        job_id = await table.submit(result_ttl_s=100)
        worker = table.worker()
        turn = worker.claim(1)
        assert worker.succeed(turn.lease, job_id, make_response())
        job = await table.jobs.get(job_id, "me")
        assert (job.status, job.done, job.attempt) == ("succeeded", True, 1)
        assert job.usage.state_tokens == job.request["state_tokens"] == 4
        assert job.expires_at == pytest.approx(job.finished_at + 100)
        assert json.loads(await table.jobs.result(job_id, "me"))["answers"]["q"]["noul"] == 0.5
        assert 0 < table.redis.pttl(table.key("job", job_id)) <= 100_000
        assert 0 < table.redis.pttl(table.key("res", job_id)) <= 100_000

    @pytest.mark.sabotage("commit", "return (j.status == status) and took(j.finished) or 0", "return 0")
    async def test_jobs_that_end_together_end_each_for_itself(self, table, make_response):
        ids = [await table.submit(state=f"state {n}") for n in range(3)]
        worker = table.worker()
        turn = worker.claim(1)
        await table.jobs.cancel(ids[1], "me")
        together = [Success(job_id, make_response(), 5.0) for job_id in ids]
        assert [*map(bool, worker.succeed_all(turn.lease, together, "weights"))] == [True, False, True]
        assert [*map(bool, worker.succeed_all(turn.lease, together, "weights"))] == [True, False, True], (
            "its answer was lost"
        )
        assert worker.succeed_all(turn.lease, [], "weights") == []
        statuses = [(await table.jobs.get(job_id, "me")).status for job_id in ids]
        assert statuses == ["succeeded", "canceled", "succeeded"]
        assert dict((await table.jobs.stats()).finished) == {"succeeded": 2, "canceled": 1}

    @pytest.mark.sabotage("commit", "bury(id, j.tenant, expires, j.ttl_ms + j.tomb_ms)", "")
    async def test_a_job_whose_retention_ended_is_gone_and_not_unknown(self, table, make_response):
        job_id = await table.submit()
        worker = table.worker()
        worker.succeed(worker.claim(1).lease, job_id, make_response())
        table.redis.delete(table.key("job", job_id), table.key("res", job_id))  # what their TTL does
        with pytest.raises(JobExpired):
            await table.jobs.get(job_id, "me")
        with pytest.raises(JobNotFound):
            await table.jobs.get(job_id, "you")
        with pytest.raises(JobNotFound):
            await table.jobs.get("job_unheard_of", "me")

    @pytest.mark.sabotage("commit", "if not mine and not (open and refusal == '1') then", "if false then")
    @pytest.mark.sabotage("commit", "(open and refusal == '1')", "open")
    async def test_only_the_lease_that_holds_the_job_may_end_it(self, table, make_response):
        job_id = await table.submit()
        stalled, healthy = table.worker("stalled"), table.worker("healthy")
        old = stalled.claim(1)
        stalled.free(old.lease, "lost")
        new = healthy.claim(2)
        assert not stalled.succeed(old.lease, job_id, make_response(computed_tokens=1))
        assert not stalled.fail(old.lease, job_id, BROKEN)
        assert healthy.succeed(new.lease, job_id, make_response(computed_tokens=2))
        assert not stalled.fail(old.lease, job_id, TOO_LONG)
        job = await table.jobs.get(job_id, "me")
        assert (job.status, job.usage.computed_tokens, job.attempt) == ("succeeded", 2, 2)

    @pytest.mark.sabotage("commit", "(open and refusal == '1')", "false")
    @pytest.mark.sabotage("commit", "redis.call('SREM', K('leasejobs', j.lease), id)", "")
    @pytest.mark.sabotage("commit", "dequeue(id)\n    place(j.group)", "")
    async def test_a_refusal_stands_though_its_lease_was_lost(self, table, make_response):
        waits, runs = await table.submit("waits"), await table.submit("runs", lane="offline")
        stalled, healthy = table.worker("stalled"), table.worker("healthy", lanes=("offline",))
        old = [stalled.claim(1) for _ in range(2)]
        for turn in old:
            stalled.free(turn.lease, "lost")
        new = healthy.claim(2)
        assert [job.id for job in new.jobs] == [runs]
        for turn, job_id in zip(old, (waits, runs), strict=True):
            assert stalled.fail(turn.lease, job_id, TOO_LONG)
            assert stalled.fail(turn.lease, job_id, TOO_LONG), "also where the answer was lost"
            job = await table.jobs.get(job_id, "me")
            assert (job.status, job.error.code) == ("failed", TOO_LONG.code)
        assert healthy.progress(new.lease, "deciding", [runs]) == set()
        assert not healthy.succeed(new.lease, runs, make_response())
        assert not table.redis.smembers(table.key("leasejobs", new.lease))
        healthy.free(new.lease, "lost")
        stats = await table.jobs.stats()
        assert (stats.finished, stats.lanes["interactive"].queued_jobs) == ({"failed": 2}, 0)
        assert not table.worker().claim(3).jobs

    @pytest.mark.sabotage("commit", "elseif not open then", "elseif false then")
    async def test_a_commit_whose_answer_was_lost_may_be_sent_again(self, table, make_response):
        job_id = await table.submit()
        worker = table.worker()
        lease = worker.claim(1).lease
        assert worker.succeed(lease, job_id, make_response())
        assert worker.succeed(lease, job_id, make_response())
        assert not worker.fail(lease, job_id, BROKEN)
        stats = await table.jobs.stats()
        assert stats.finished == {"succeeded": 1}
        assert stats.work["tokens_read"] == make_response().usage.computed_tokens, "counted once"

    @pytest.mark.sabotage(
        "commit", "spent.state_cached and 'states_cached' or 'states_read'", "'states_read'"
    )
    async def test_what_answers_cost_is_summed_up(self, table, make_response):
        worker = table.worker()
        for n, cached in enumerate((False, True, True)):
            job_id = await table.submit(f"state {n}")
            usage = {"input_tokens": 100, "computed_tokens": 90 - 80 * cached, "state_cached": cached}
            assert worker.succeed(worker.claim(1).lease, job_id, make_response(**usage))
        work = (await table.jobs.stats()).work
        assert work == {"tokens_asked": 300, "tokens_read": 110, "states_read": 1, "states_cached": 2}

    @pytest.mark.sabotage("progress", "if j.status == 'running' and", "if")
    async def test_progress_cannot_touch_a_job_that_is_done(self, table, make_response):
        job_id = await table.submit()
        worker = table.worker()
        lease = worker.claim(1).lease
        assert worker.progress(lease, "deciding", [job_id]) == {job_id}
        assert (await table.jobs.get(job_id, "me")).progress.stage == "deciding"
        worker.succeed(lease, job_id, make_response())
        assert worker.progress(lease, "deciding", [job_id]) == set()
        assert (await table.jobs.get(job_id, "me")).progress.stage == "finished"

    @pytest.mark.sabotage("progress", "j.status == 'running' and j.lease == ARGV[1]", "j.status == 'running'")
    async def test_progress_of_a_job_that_another_worker_has_is_no_business_of_the_first(self, table):
        job_id = await table.submit()
        stalled, healthy = table.worker("stalled"), table.worker("healthy")
        old = stalled.claim(1)
        stalled.free(old.lease, "lost")
        healthy.claim(2)
        assert stalled.progress(old.lease, "deciding", [job_id]) == set()
        assert (await table.jobs.get(job_id, "me")).progress.stage == "preparing"

    @pytest.mark.sabotage("commit", "post_event(id, status, now, error_json)", "")
    async def test_the_webhook_outbox_is_written_with_the_status(self, table, make_response):
        heard = await table.submit(webhook={"url": "https://example.com/h"})
        deaf = await table.submit(webhook={"url": "https://example.com/h", "events": ["job.failed"]})
        await table.submit()
        worker = table.worker()
        turn = worker.claim(1)
        for job in turn.jobs:
            worker.succeed(turn.lease, job.id, make_response())
        assert table.redis.zrange(table.key("outbox", "me"), 0, -1) == [f"msg_{heard.removeprefix('job_')}_1"]
        assert (await table.jobs.get(deaf, "me")).webhook["url"] == "https://example.com/h"

    @pytest.mark.sabotage("commit", "redis.call('ZREMRANGEBYSCORE', need, '-inf', int(now_ms()))", "")
    async def test_a_state_that_is_always_wanted_forgets_the_jobs_that_no_longer_want_it(self, table):
        first, second, third = [await table.submit("hot") for _ in range(3)]
        worker = table.worker()
        turn = worker.claim(1)
        need = table.key("need", turn.jobs[0].group)
        worker.fail(turn.lease, first, BROKEN)
        table.redis.zadd(need, {first: 1})  # its retention has ended
        worker.fail(turn.lease, second, BROKEN)
        assert set(table.redis.zrange(need, 0, -1)) == {second, third}


class TestFree:
    async def test_given_back_jobs_wait_again_unharmed(self, table):
        job_id = await table.submit()
        worker = table.worker()
        turn = worker.claim(1)
        freed = worker.free(turn.lease, "back")
        assert (freed.back, freed.ended, freed.wakes) == (1, 0, ["interactive"])
        job = await table.jobs.get(job_id, "me")
        assert (job.status, job.attempt, job.started_at) == ("queued", 0, None)
        assert worker.free(turn.lease, "back").back == -1

    @pytest.mark.sabotage("claim", "local suspect = tonumber(j.losses) > 0", "local suspect = false")
    async def test_a_lost_job_runs_alone_and_its_mates_are_answered(self, table):
        suspects = [await table.submit("s") for _ in range(2)]
        worker = table.worker()
        worker.free(worker.claim(1).lease, "lost")
        fresh = await table.submit("s")
        turns = []
        while (turn := worker.claim(1)).jobs:
            turns.append([job.id for job in turn.jobs])
            for job in turn.jobs:
                worker.fail(turn.lease, job.id, BROKEN)
            assert not {job.id for job in worker.more(turn.lease)} & set(suspects)
            worker.free(turn.lease, "back")
        assert turns[0] == [suspects[0]]
        assert sorted(itertools.chain(*turns)) == sorted([*suspects, fresh])
        assert all(len(turn) == 1 for turn in turns if set(turn) & set(suspects))

    @pytest.mark.sabotage("free", "lost and (job.deciding or not in_a_pass)", "lost")
    async def test_who_was_not_in_the_pass_that_was_lost_loses_no_attempt(self, table):
        ids = [await table.submit("s") for _ in range(4)]
        worker = table.worker()
        turn = worker.claim(1)
        worker.progress(turn.lease, "deciding", ids[:1])
        worker.fail(turn.lease, ids[0], BROKEN)
        worker.progress(turn.lease, "deciding", ids[1:3])
        worker.free(turn.lease, "lost")
        losses = [table.redis.hget(table.key("job", job_id), "losses") for job_id in ids[1:]]
        assert losses == ["1", "1", "0"]
        assert [(await table.jobs.get(job_id, "me")).attempt for job_id in ids[1:]] == [1, 1, 0]

    @pytest.mark.sabotage("free", "lost and (job.deciding or not in_a_pass)", "lost and job.deciding")
    async def test_lost_before_any_pass_all_are_suspects(self, table):
        ids = [await table.submit("s") for _ in range(2)]
        worker = table.worker()
        worker.free(worker.claim(1).lease, "lost")
        assert [table.redis.hget(table.key("job", job_id), "losses") for job_id in ids] == ["1", "1"]

    @pytest.mark.sabotage("free", "if losses >= tonumber(j.max_attempts) then", "if false then")
    async def test_a_poison_job_fails_after_its_attempts(self, table):
        job_id = await table.submit()
        worker = table.worker()
        for attempt in (1, 2, 3):
            turn = worker.claim(1)
            assert turn.jobs[0].attempt == attempt
            worker.free(turn.lease, "lost")
        job = await table.jobs.get(job_id, "me")
        assert (job.status, job.error.code, job.attempt) == ("failed", "max_attempts", 3)
        assert not worker.claim(1).jobs

    @pytest.mark.sabotage(
        "reap", "local back, dead, lanes = free_lease(lease, true, now)", "local back, dead, lanes = 0, 0, {}"
    )
    async def test_a_lease_not_renewed_is_reaped(self, table):
        job_id = await table.submit()
        worker = table.worker()
        lease = worker.claim(1).lease
        assert worker.renew(lease)
        assert worker.reap().leases == 0
        table.redis.zadd(table.key("leases"), {lease: 1})
        assert worker.reap().leases == 1
        assert not worker.renew(lease)
        assert (await table.jobs.get(job_id, "me")).status == "queued"

    @pytest.mark.sabotage("renew", "redis.call('ZADD', K('leases'), int(now_ms() + ARGV[2]), ARGV[1])", "")
    async def test_a_lease_that_is_renewed_is_kept(self, table):
        job_id = await table.submit()
        worker = table.worker()
        lease = worker.claim(1).lease
        table.redis.zadd(table.key("leases"), {lease: 1})
        assert worker.renew(lease)
        assert worker.reap().leases == 0
        assert (await table.jobs.get(job_id, "me")).status == "running"

    async def test_a_lost_wake_is_found_once(self, table):
        await table.submit()
        worker = table.worker()
        table.redis.delete(table.key("wake", "interactive"))
        assert worker.reap().wakes == ["interactive"]
        assert worker.reap().wakes == []

    async def test_no_wake_is_added_while_one_waits(self, table):
        await table.submit()
        table.redis.delete(table.key("wake", "interactive"))
        table.redis.lpush(table.key("mq", "interactive"), "a wake-up")
        assert table.worker().reap().wakes == []


class TestEndings:
    async def test_cancel_of_a_waiting_job(self, table):
        job_id = await table.submit()
        assert (await table.jobs.cancel(job_id, "me")).status == "canceled"
        assert not table.worker().claim(1).jobs

    @pytest.mark.sabotage("cancel", "finish(id, 'canceled', now_ms())", "")
    async def test_cancel_of_a_running_job_refuses_its_commit(self, table, make_response):
        job_id = await table.submit()
        worker = table.worker()
        lease = worker.claim(1).lease
        assert (await table.jobs.cancel(job_id, "me")).status == "canceled"
        assert worker.progress(lease, "deciding", [job_id]) == set()
        assert not worker.succeed(lease, job_id, make_response())
        assert worker.free(lease, "lost").back == 0

    async def test_cancel_of_finished_jobs_changes_nothing(self, table, make_response):
        job_id = await table.submit()
        worker = table.worker()
        worker.succeed(worker.claim(1).lease, job_id, make_response())
        for _ in range(20):
            assert (await table.jobs.cancel(job_id, "me")).status == "succeeded"
        with pytest.raises(JobNotFound):
            await table.jobs.cancel(job_id, "you")

    @pytest.mark.sabotage("reap", "if status == 'queued' or status == 'running' then", "if false then")
    async def test_a_job_not_started_in_time_expires(self, table):
        job_id = await table.submit(expires_in_s=1)
        table.redis.zadd(table.key("deadlines"), {job_id: 1})
        assert table.worker().reap().ended == 1
        job = await table.jobs.get(job_id, "me")
        assert (job.status, job.error.code) == ("expired", "job_expired")
        assert not table.worker().claim(1).jobs

    async def test_a_claim_drops_what_is_overdue(self, table):
        job_id = await table.submit(expires_in_s=1)
        table.redis.hset(table.key("job", job_id), "deadline", 1)
        assert not table.worker().claim(1).jobs
        assert (await table.jobs.get(job_id, "me")).status == "expired"

    async def test_a_job_that_runs_too_long_expires(self, table, make_response):
        job_id = await table.submit(timeout_s=5)
        worker = table.worker()
        lease = worker.claim(1).lease
        assert table.redis.zincrby(table.key("deadlines"), -6_000, job_id) > 0
        worker.reap()
        assert (await table.jobs.get(job_id, "me")).status == "expired"
        assert not worker.succeed(lease, job_id, make_response())

    async def test_a_failed_job_can_be_retried_under_its_id(self, table, make_response):
        job_id = await table.submit()
        worker = table.worker()
        turn = worker.claim(1)
        worker.fail(turn.lease, job_id, BROKEN)
        worker.free(turn.lease, "back")
        assert (await table.jobs.get(job_id, "me")).error == BROKEN
        assert (await table.jobs.retry(job_id, "me")).job_id == job_id
        job = await table.jobs.get(job_id, "me")
        assert (job.status, job.error, job.finished_at, job.expires_at) == ("queued", None, None, None)
        assert table.redis.pttl(table.key("job", job_id)) == -1
        turn = worker.claim(1)
        assert (turn.jobs[0].attempt, turn.jobs[0].state) == (2, "=the state")
        worker.succeed(turn.lease, job_id, make_response())
        with pytest.raises(AlreadySucceeded):
            await table.jobs.retry(job_id, "me")

    async def test_delete_erases_every_trace_but_the_tombstone(self, table):
        job_id = await table.submit("secret words")
        worker = table.worker()
        turn = worker.claim(1)
        with pytest.raises(JobNotFinished):
            await table.jobs.delete(job_id, "me")
        worker.fail(turn.lease, job_id, BROKEN)
        worker.free(turn.lease, "back")
        await table.jobs.delete(job_id, "me")
        with pytest.raises(JobExpired):
            await table.jobs.get(job_id, "me")
        left = table.redis.keys(table.key("job", "*")) + table.redis.keys(table.key("st", "*"))
        assert left == []
        assert (await table.jobs.list_jobs("me")).jobs == ()

    async def test_delete_takes_a_waiting_job_out_of_the_queue(self, table):
        await table.jobs.delete(await table.submit(), "me")
        assert not table.worker().claim(1).jobs
        stats = (await table.jobs.stats()).lanes["interactive"]
        assert (stats.queued_jobs, stats.queued_tokens, stats.queued_bytes) == (0, 0, 0)
