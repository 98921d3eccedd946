"""Turns under leases: what is claimed together, what is sent twice, and who hears of it."""

import asyncio

import pytest

from d3serve.store import waiters as waiters_module
from d3serve.store.table import AsyncTable, Table

pytestmark = pytest.mark.anyio


@pytest.fixture
def twice(monkeypatch):
    """Every answer is lost on its way, so every call is sent again."""
    run, run_async = Table.run, AsyncTable.run

    def again(self, *args):
        run(self, *args)
        return run(self, *args)

    async def again_async(self, *args):
        await run_async(self, *args)
        return await run_async(self, *args)

    monkeypatch.setattr(Table, "run", again)
    monkeypatch.setattr(AsyncTable, "run", again_async)


class TestSentTwice:
    @pytest.mark.sabotage("claim", "if redis.call('EXISTS', K('lease', lease)) == 1 then", "if false then")
    @pytest.mark.sabotage("commit", "elseif not open then", "elseif false then")
    @pytest.mark.usefixtures("twice")
    async def test_a_life_in_which_every_answer_is_lost_once(self, table, make_request, make_response):
        submitted = await table.jobs.submit(
            make_request(webhook={"url": "https://example.com/"}), tenant="me", idempotency_key="k"
        )
        canceled = await table.submit("another")
        assert (await table.jobs.cancel(canceled, "me")).status == "canceled"
        worker = table.worker()
        turn = worker.claim(1)
        assert [job.id for job in turn.jobs] == [submitted.job_id]
        assert worker.progress(turn.lease, "deciding", [submitted.job_id]) == {submitted.job_id}
        assert worker.renew(turn.lease)
        assert worker.succeed(turn.lease, submitted.job_id, make_response())
        worker.free(turn.lease, "back")
        stats = await table.jobs.stats()
        assert stats.finished == {"succeeded": 1, "canceled": 1}
        assert (await table.jobs.get(submitted.job_id, "me")).attempt == 1
        assert [(lane.queued_jobs, lane.queued_tokens) for lane in stats.lanes.values()] == [(0, 0)] * 2
        assert table.redis.zrange(table.key("outbox", "me"), 0, -1) == [
            f"msg_{submitted.job_id.removeprefix('job_')}_1"
        ]

    @pytest.mark.sabotage("submit", "if redis.call('EXISTS', K('job', id)) == 1 then", "if false then")
    async def test_a_submit_sent_again_when_its_job_already_runs_leaves_it_alone(self, table, monkeypatch):
        sent, run = [], table.jobs._table.run

        async def noted(*args):
            sent.append(args)
            return await run(*args)

        monkeypatch.setattr(table.jobs._table, "run", noted)
        job_id = await table.submit()
        table.worker().claim(1)
        assert (await run(*sent[0]))[:2] == ["new", job_id]
        assert (await table.jobs.get(job_id, "me")).status == "running"
        assert not table.worker().claim(1).jobs

    async def test_late_joiners_of_a_lost_answer_come_back_unharmed(self, table):
        await table.submit("s")
        worker = table.worker()
        turn = worker.claim(1)
        late = await table.submit("s")
        worker._table.run("more", turn.lease, 1_000, 10)  # nobody hears of it
        assert worker.more(turn.lease) == []
        worker.free(turn.lease, "back")
        assert (await table.jobs.get(late, "me")).attempt == 0
        assert late in [job.id for job in worker.claim(1).jobs]


class TestOrder:
    async def warm_on(self, table, worker, state, make_response):
        """Let a worker answer a job of the state and keep it in its cache; the state waits again."""
        await table.submit(state)
        turn = worker.claim(1)
        worker.succeed(turn.lease, turn.jobs[0].id, make_response())
        worker.free(turn.lease, "back", [turn.jobs[0].group])
        return await table.submit(state)

    @pytest.mark.sabotage("claim", "and 4 or 3", "and 4 or 2")
    async def test_a_state_that_a_live_worker_holds_is_left_to_it_for_a_while(self, table, make_response):
        other, idle = table.worker("other"), table.worker("idle", max_batch_questions=1)
        other.publish({"pid": 1})
        held = await self.warm_on(table, other, "held", make_response)
        cold = await table.submit("cold")
        assert [job.id for job in idle.claim(1).jobs] == [cold]
        assert [job.id for job in idle.claim(1).jobs] == [held], "but not for lack of other work"

    @pytest.mark.sabotage("claim", "holder and redis.call('EXISTS', K('worker', holder)) == 1", "holder")
    async def test_a_state_that_a_dead_worker_held_waits_for_nobody(self, table, make_response):
        held = await self.warm_on(table, table.worker("dead"), "held", make_response)
        await table.submit("cold")
        assert [job.id for job in table.worker("idle", max_batch_questions=1).claim(1).jobs] == [held]

    @pytest.mark.sabotage("claim", "lane == 'offline' and math.min(max_tokens, OFFLINE_TOKENS) or", "")
    async def test_an_offline_turn_is_short_though_many_wait(self, table):
        ids = [await table.submit(f"{number} " + "x" * 1_600, lane="offline") for number in range(20)]
        jobs = table.worker(max_batch_tokens=16_384).claim(1).jobs
        assert [job.id for job in jobs] == ids[: len(jobs)]
        assert 2 <= len(jobs) < 10

    async def test_an_offline_turn_holds_one_state_however_long_it_is(self, table):
        long = await table.submit("x" * 100_000, lane="offline")
        await table.submit("short", lane="offline")
        assert [job.id for job in table.worker().claim(1).jobs] == [long]

    @pytest.mark.sabotage("claim", " and not alone do", " do")
    async def test_nothing_is_claimed_beside_a_suspect(self, table):
        suspect = await table.submit("a")
        worker = table.worker()
        worker.free(worker.claim(1).lease, "lost")
        await table.submit("b")
        assert [job.id for job in worker.claim(1).jobs] == [suspect]

    @pytest.mark.sabotage("more", "tokens + j.tokens > max_tokens or questions", "questions")
    async def test_late_joiners_keep_to_the_budget_of_tokens(self, table):
        assert len(await self.joined(table, max_batch_tokens=600)) == 1

    @pytest.mark.sabotage("more", " or questions + j.questions > max_questions", "")
    async def test_late_joiners_keep_to_the_budget_of_questions(self, table):
        assert len(await self.joined(table, max_batch_questions=2)) == 2

    async def joined(self, table, **budget):
        """What a turn takes of three late joiners, each of 1,600 bytes."""
        await table.submit("s")
        worker = table.worker(**budget)
        turn = worker.claim(1)
        for name in "abc":
            await table.submit("s", (name * 1_600,))
        return worker.more(turn.lease)


class TestHearing:
    @pytest.fixture(autouse=True)
    def _patience(self, request):
        """Enough for a busy machine; what a sabotage has stopped would not come in any time."""
        self.patience_s = 1 if request.node.get_closest_marker("xfail") else 8

    @pytest.mark.sabotage("claim", "redis.call('DEL', K('wake', lane))", "")
    async def test_work_that_comes_after_a_claim_wakes_again(self, table, make_request):
        await table.submit("a")
        table.worker().claim(1)
        assert (await table.jobs.submit(make_request("b"), tenant="me")).wake

    @pytest.mark.sabotage("commit", "  post_event(id, status, now, error_json)\n  tell(id, status)", "")
    async def test_who_waits_hears_of_the_end_and_need_not_look(self, table, make_response, monkeypatch):
        job_id = await table.submit()
        await self.ends(table, job_id, monkeypatch, self.succeed, make_response())

    @pytest.mark.sabotage("delete", "tell(id, 'deleted')", "")
    async def test_who_waits_hears_of_the_deletion(self, table, monkeypatch):
        job_id = await table.submit()
        with pytest.raises(Exception, match="no longer kept"):
            await self.ends(table, job_id, monkeypatch, self.delete)

    async def ends(self, table, job_id, monkeypatch, end, *args):
        """Wait for a job that ends once it is waited for, without the look that repairs a lost word."""
        monkeypatch.setattr(waiters_module, "REREAD_S", 300.0)
        looked = asyncio.Event()
        pause = table.jobs._pause

        async def told(*waiting):
            looked.set()
            await pause(*waiting)

        monkeypatch.setattr(table.jobs, "_pause", told)
        while not table.redis.pubsub_numsub(table.key("done"))[0][1]:  # noqa: ASYNC110 # in Redis
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(table.jobs.wait(job_id, "me", 300))
        await looked.wait()
        await end(table, job_id, *args)
        return await asyncio.wait_for(waiting, self.patience_s)

    async def succeed(self, table, job_id, answer):
        worker = table.worker()
        assert worker.succeed(worker.claim(1).lease, job_id, answer)

    async def delete(self, table, job_id):
        await table.jobs.delete(job_id, "me")


async def test_pages_are_whole_where_many_jobs_are_of_one_millisecond(table):
    ids = {await table.submit(str(number)) for number in range(12)}
    table.redis.zadd(table.key("jobs", "me"), dict.fromkeys(ids, 1_000))
    seen, cursor = [], None
    while cursor is not None or not seen:
        page = await table.jobs.list_jobs("me", limit=5, cursor=cursor)
        seen += [job.id for job in page.jobs]
        cursor = page.cursor
    assert len(seen) == len(ids)
    assert set(seen) == ids


async def test_a_list_begins_after_the_moment_asked_for(table):
    ids = [await table.submit(str(number)) for number in range(3)]
    for age, job_id in enumerate(ids):
        table.redis.zadd(table.key("jobs", "me"), {job_id: 1_000 + age})
    page = await table.jobs.list_jobs("me", created_after=1.001)
    assert [job.id for job in page.jobs] == [ids[2]]
