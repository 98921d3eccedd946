"""The contract of the job table, continued: how jobs are read, and what they were asked."""

import asyncio
import json

import pytest

from d3serve.errors import (
    InvalidRequest,
    JobNotFound,
    RequestErased,
)
from d3serve.schemas import JobError
from d3serve.store.jobs import JobStore

pytestmark = pytest.mark.anyio
BROKEN = JobError(code="internal_error", message="broken")
TOO_LONG = JobError(code="max_tokens_exceeded", message="too long")


class TestReading:
    async def test_wait_returns_as_soon_as_the_job_is_done(self, table, make_response):
        job_id = await table.submit()
        worker = table.worker()
        waiting = [asyncio.create_task(table.jobs.wait(job_id, "me", 300)) for _ in range(5)]
        lease = worker.claim(1).lease
        await asyncio.sleep(0)
        worker.succeed(lease, job_id, make_response())
        for job in await asyncio.wait_for(asyncio.gather(*waiting), 60):
            assert job.status == "succeeded"

    async def test_wait_ends_with_its_time(self, table):
        job_id = await table.submit()
        assert (await table.jobs.wait(job_id, "me", 0.05)).status == "queued"
        with pytest.raises(JobNotFound):
            await table.jobs.wait(job_id, "you", 0.05)

    async def test_watch_shows_every_status(self, table, make_response):
        job_id = await table.submit()
        worker = table.worker()
        seen = []
        async for job in table.jobs.watch(job_id, "me"):
            seen.append(job.status)
            if job.status == "queued":
                lease = worker.claim(1).lease
            elif job.status == "running":
                worker.succeed(lease, job_id, make_response())
        assert seen == ["queued", "running", "succeeded"]

    async def test_a_list_pages_newest_first_and_filters(self, table):
        ids = [await table.submit(f"s{i}", metadata={"even": str(i % 2 == 0)}) for i in range(7)]
        await table.submit("other", tenant="you")
        pages, cursor = [], None
        while True:
            page = await table.jobs.list_jobs("me", limit=3, cursor=cursor)
            pages += [job.id for job in page.jobs]
            cursor = page.cursor
            if cursor is None:
                break
            await table.submit("new while paging", tenant="me")
        assert sorted(pages) == sorted(ids)
        even = await table.jobs.list_jobs("me", metadata={"even": "True"}, limit=50)
        assert {job.id for job in even.jobs} == set(ids[::2])
        assert len((await table.jobs.list_jobs("me", status="succeeded")).jobs) == 0
        with pytest.raises(InvalidRequest):
            await table.jobs.list_jobs("me", cursor="nonsense")

    async def test_a_position_tells_how_long_it_will_take(self, table):
        ids = [await table.submit(f"s{i}") for i in range(5)]
        assert (await table.jobs.get(ids[4], "me")).queue.eta_s is None  # nobody has told a speed
        table.worker().publish({"tokens_per_s": 10})
        table.jobs._census._speed_until = 0.0
        place = (await table.jobs.get(ids[4], "me")).queue
        assert place.position == 4
        assert place.eta_s == pytest.approx(place.ahead_tokens / 10, abs=0.1)
        assert place.ahead_tokens > 0

    async def test_a_caller_that_leaves_late_leaves_nothing_for_ever(self, table):
        job_id = await table.submit()
        await table.jobs.join(job_id)
        table.redis.delete(table.key("callers", job_id))  # what its TTL does
        await table.jobs.leave(job_id)
        assert table.redis.ttl(table.key("callers", job_id)) > 0

    async def test_stats_count_lanes_and_running_jobs(self, table, make_response):
        for i in range(3):
            await table.submit(f"s{i}")
        await table.submit("o", lane="offline")
        worker = table.worker(max_batch_questions=1)
        worker.publish({"pid": 7, "tokens_per_s": 100, "load": "loaded", "lanes": "interactive,offline"})
        turn = worker.claim(7)
        stats = await table.jobs.stats()
        assert (stats.lanes["interactive"].queued_jobs, stats.lanes["offline"].queued_jobs) == (2, 1)
        assert (stats.running_jobs, stats.workers, stats.tokens_per_s) == (1, 1, 100)
        worker.succeed(turn.lease, turn.jobs[0].id, make_response())
        assert (await table.jobs.stats()).finished == {"succeeded": 1}

    async def test_a_queue_that_has_emptied_leaves_nothing_behind(self, table, make_response):
        for i in range(20):
            await table.submit(f"s{i % 4}", lane=("offline" if i % 2 else None))
        worker = table.worker(max_batch_questions=3, max_kept_bytes_per_tenant=0)  # no room for reading back
        while (turn := worker.claim(1)).jobs:
            for job in turn.jobs:
                worker.succeed(turn.lease, job.id, make_response())
            worker.free(turn.lease, "back")
        kept = {
            "job",
            "res",
            "gone",
            "jobs",
            "finished",
            "work",
            "load",
            "wake",
            "ring",
            "pace",
            "kept",
            "holds",
            "tally",
        }
        names = {name.removeprefix(table.key("job")[:-4]).split(":")[0] for name in table.redis.keys("*")}
        assert names <= kept
        assert all(
            value == "0"
            for lane in ("interactive", "offline")
            for value in table.redis.hgetall(table.key("load", lane)).values()
        )


class TestReadingBack:
    """What a job was asked, for as long as that is kept."""

    @pytest.mark.sabotage("commit", "and not keep_input then", "then")
    async def test_it_is_there_while_a_job_waits_runs_and_has_ended(self, table, make_response):
        job_id = await table.submit("the state", ("q", "r"))
        worker = table.worker()
        seen = [await table.jobs.asked(job_id)]
        turn = worker.claim(1)
        seen.append(await table.jobs.asked(job_id))
        worker.succeed(turn.lease, job_id, make_response())
        worker.free(turn.lease, "back")
        seen.append(await table.jobs.asked(job_id))
        assert {state for state, _ in seen} == {"=the state"}
        assert {tuple(json.loads(questions)) for _, questions in seen} == {("q", "r")}

    async def test_it_goes_an_hour_after_success_and_is_counted_until_then(self, table, make_response):
        job_id = await table.submit("x" * 100_000)
        worker = table.worker(max_batch_tokens=10**6)
        worker.succeed(worker.claim(1).lease, job_id, make_response())
        (group,) = table.redis.keys(table.key("st", "*"))
        for name in (group, table.key("body", job_id)):
            assert 3_500 < table.redis.ttl(name) <= 3_600
        assert int(table.redis.hget(table.key("kept"), "me")) > 100_000
        for entry, till in table.redis.zrange(table.key("holds"), 0, -1, withscores=True):
            table.redis.zadd(table.key("holds"), {entry: till - 3_601_000})
        table.redis.delete(group, table.key("body", job_id))
        await table.jobs.sweep()
        record = int(table.redis.hget(table.key("job", job_id), "record"))
        assert (
            int(table.redis.hget(table.key("kept"), "me"))
            == record
            > table.redis.strlen(table.key("res", job_id))
        )
        with pytest.raises(RequestErased, match="no longer kept"):
            await table.jobs.asked(job_id)
        assert (await table.jobs.get(job_id, "me")).status == "succeeded"

    @pytest.mark.sabotage("commit", "<= tonumber(room)", "<= 1e15")
    async def test_a_tenant_that_keeps_much_keeps_no_answered_request(self, table, make_response):
        """Nothing that waits is refused for the sake of what has its answer."""
        job_id = await table.submit("x" * 2**20)
        worker = table.worker(max_batch_tokens=10**7, max_kept_bytes_per_tenant=2**22)
        worker.succeed(worker.claim(1).lease, job_id, make_response())
        assert not table.redis.keys(table.key("st", "*"))
        with pytest.raises(RequestErased):
            await table.jobs.asked(job_id)

    @pytest.mark.parametrize(("used", "is_kept"), [(25, True), (26, False)])
    async def test_where_redis_fills_no_answered_request_is_kept(
        self, table, make_response, monkeypatch, used, is_kept
    ):
        """Of many tenants each keeps little, and all of them may fill it."""
        job_id = await table.submit("the state")
        worker = table.worker()
        full = {"maxmemory": 100, "used_memory": used}
        monkeypatch.setattr(worker._table.client, "info", lambda _section: full)
        worker.succeed(worker.claim(1).lease, job_id, make_response())
        assert bool(table.redis.keys(table.key("st", "*"))) == is_kept
        assert bool(table.redis.exists(table.key("body", job_id))) == is_kept

    async def test_a_large_state_is_read_from_its_file(self, table, make_request, make_response, tmp_path):
        settings = table.settings.model_copy(update={"state_dir": tmp_path / "states"})
        async with JobStore(table.jobs._table.client, settings) as jobs:
            job_id = (await jobs.submit(make_request("é" * 2**18), tenant="me")).job_id
            assert (await jobs.asked(job_id))[0] == "=" + "é" * 2**18
            worker = table.worker(max_batch_tokens=10**7, state_dir=tmp_path / "states")
            worker.succeed(worker.claim(1).lease, job_id, make_response())
            assert (await jobs.asked(job_id))[0] == "=" + "é" * 2**18
        with pytest.raises(RequestErased):
            await table.jobs.asked(job_id)  # of an API that sees no folder

    async def test_of_a_job_that_is_erased_nothing_is_left(self, table, make_response):
        job_id = await table.submit("secret")
        worker = table.worker()
        turn = worker.claim(1)
        worker.succeed(turn.lease, job_id, make_response())
        worker.free(turn.lease, "back")
        await table.jobs.delete(job_id, "me")
        for name in ("st", "body", "need"):
            assert not table.redis.keys(table.key(name, "*"))
        assert not table.redis.exists(table.key("kept"))
        with pytest.raises(RequestErased):
            await table.jobs.asked(job_id)
