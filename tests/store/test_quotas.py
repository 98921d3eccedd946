"""What one tenant may have: so many waiting jobs and kept bytes, counted exactly, until they have really gone."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from d3serve.commands import main as cli
from d3serve.errors import JobExpired, QuotaExceeded, StorageUnavailable
from d3serve.schemas import JobError
from d3serve.settings import Settings
from d3serve.store import erasure, listing, states
from d3serve.store.connect import open_sync
from d3serve.store.encode import state_group
from d3serve.store.jobs import JobStore
from d3serve.store.operate import Operator
from d3serve.store.turns import TurnStore
from d3serve.up.broker import EmbeddedBroker

pytestmark = pytest.mark.anyio
BROKEN = JobError(code="internal_error", message="broken")
MB = 2**20


def limit(table, **limits):
    table.jobs._settings = table.settings.model_copy(update=limits)


def kept(table, tenant="me"):
    return int(table.redis.hget(table.key("kept"), tenant) or 0)


def age(table, seconds):
    """Let time pass for what is kept: entries and keys alike."""
    held = table.redis.zrange(table.key("holds"), 0, -1, withscores=True)
    for entry, till in held:
        table.redis.zadd(table.key("holds"), {entry: till - 1_000 * seconds})
    for name in table.redis.keys("*"):
        if (left := table.redis.ttl(name)) >= 0:
            table.redis.expire(name, left - seconds)
    for name in table.redis.keys(table.key("job", "*")):
        if table.redis.hexists(name, "expires"):
            table.redis.hincrby(name, "expires", -1_000 * seconds)


class TestWaiting:
    @pytest.mark.sabotage("submit", "if waiting >= max_tenant_jobs then", "if false then")
    async def test_one_tenant_may_not_fill_the_queue(self, table):
        limit(table, max_queued_jobs_per_tenant=3)
        ids = [await table.submit(f"s{i}", lane="offline" if i else None) for i in range(3)]
        with pytest.raises(QuotaExceeded) as refusal:
            await table.submit("one too many")
        error = refusal.value
        assert (error.code, error.http_status, error.retryable) == ("quota_exceeded", 429, True)
        assert (error.details["limit"], error.details["used"]) == (3, 3)
        assert 5 <= error.details["retry_after_s"] <= 60
        await table.submit("another's", tenant="you")
        await table.jobs.cancel(ids[0], "me")
        await table.submit("there is room again")

    async def test_when_there_may_be_room_follows_from_what_waits_and_the_speed(self, table):
        limit(table, max_queued_jobs_per_tenant=1)
        await table.submit("x" * 40_000)
        table.worker().publish({"tokens_per_s": 50})
        table.jobs._census._speed_until = 0.0
        with pytest.raises(QuotaExceeded) as refusal:
            await table.submit("one too many")
        assert refusal.value.details["retry_after_s"] == pytest.approx(20, abs=2)


class TestKept:
    @pytest.mark.sabotage("submit", "> max_tenant_bytes then", "> 1e15 then")
    async def test_canceled_jobs_count_until_they_go(self, table):
        limit(table, max_kept_bytes_per_tenant=3 * MB)
        for number in range(2):
            await table.jobs.cancel(await table.submit(f"{number}" + "x" * MB, result_ttl_s=604_800), "me")
        with pytest.raises(QuotaExceeded, match="kept") as refusal:
            await table.submit("y" * MB)
        assert refusal.value.details["limit"] == 3 * MB
        await table.submit("y" * MB, tenant="you")

    @pytest.mark.sabotage("cancel", "KEEP_INPUT_MS[status] or INPUT_MS", "FOREVER")
    @pytest.mark.sabotage("reap", "hold_job(what, tenant, tonumber(j.record or 0), j.expires)", "")
    async def test_the_input_of_a_canceled_job_goes_after_an_hour(self, table):
        job_id = await table.submit("x" * MB, ("y" * 40_000,), result_ttl_s=604_800)
        await table.jobs.cancel(job_id, "me")
        assert kept(table) > MB + 40_000
        age(table, 3_601)
        await table.jobs.sweep()
        assert 0 < kept(table) < 10_000
        assert (await table.jobs.get(job_id, "me")).status == "canceled"
        with pytest.raises(JobExpired, match="input"):
            await table.jobs.retry(job_id, "me")

    @pytest.mark.sabotage("reap", "let_go(what, tenant, bytes)\n    redis.call('ZREM'", "redis.call('ZREM'")
    @pytest.mark.sabotage("reap", "redis.call('ZREM', K('jobs', tenant), what)", "")
    async def test_nothing_is_counted_or_listed_of_a_tenant_whose_jobs_have_gone(self, table, make_response):
        good, bad = await table.submit("good"), await table.submit("bad")
        for number in range(20):
            await table.jobs.cancel(await table.submit(f"canceled {number}"), "me")
        worker = table.worker()
        turn = worker.claim(1)
        worker.succeed(turn.lease, good, make_response())
        worker.fail(turn.lease, bad, BROKEN)
        worker.free(turn.lease, "back")
        for _ in range(2):  # their inputs, then the rest
            age(table, 86_401)
            await table.jobs.sweep()
        for name in ("kept", "holds"):
            assert not table.redis.exists(table.key(name)), name
        assert not table.redis.exists(table.key("jobs", "me"))

    @pytest.mark.sabotage("commit", "hold_job(id, j.tenant, record, expires)", "")
    async def test_a_result_is_counted_in_the_place_of_its_input(self, table, make_response):
        job_id = await table.submit("x" * MB)
        before = int(table.redis.hget(table.key("job", job_id), "record"))
        worker = table.worker(max_batch_tokens=10 * MB, max_kept_bytes_per_tenant=MB)
        worker.succeed(worker.claim(1).lease, job_id, make_response())
        assert kept(table) == before + table.redis.strlen(table.key("res", job_id))

    @pytest.mark.sabotage("submit", "entries == 2 and state_bytes or 0", "state_bytes")
    async def test_a_state_is_counted_once_however_many_ask_about_it(self, table):
        for _ in range(5):
            await table.submit("x" * MB)
        assert MB < kept(table) < MB + 20_000

    @pytest.mark.sabotage("reap", "K('batch', what)) == 0 then", "K('batch', what)) < 0 then")
    async def test_a_count_of_what_somebody_else_removed_heals(self, table):
        await table.submit("x" * MB)
        table.redis.delete(*table.redis.keys(table.key("st", "*")), *table.redis.keys(table.key("job", "*")))
        for _ in range(5):
            table.worker().reap()
        assert kept(table) == 0

    async def test_a_nearly_full_disk_takes_no_state(self, table, make_request, tmp_path, monkeypatch):
        settings = table.settings.model_copy(update={"state_dir": tmp_path / "states"})
        usage = SimpleNamespace(free=states.FREE_BYTES)
        monkeypatch.setattr(states.shutil, "disk_usage", lambda _folder: usage)
        async with JobStore(table.jobs._table.client, settings) as jobs:
            with pytest.raises(StorageUnavailable, match="nearly full"):
                await jobs.submit(make_request("x" * MB), tenant="me")
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class TestErasing:
    @pytest.mark.sabotage("delete", "redis.call('DEL', K('idem', j.idem))", "")
    async def test_a_deleted_job_leaves_no_text_and_its_key_asks_anew(self, table, make_request):
        first = await table.jobs.submit(
            make_request("secret"), tenant="me", idempotency_key="k", fingerprint="f"
        )
        await table.jobs.delete(first.job_id, "me")
        assert not table.redis.keys(table.key("idem", "*"))
        assert kept(table) == 0
        again = await table.jobs.submit(
            make_request("other"), tenant="me", idempotency_key="k", fingerprint="g"
        )
        assert again.created

    async def test_a_key_that_meanwhile_belongs_to_another_job_stays(self, table, make_request):
        first = await table.jobs.submit(make_request("s"), tenant="me", idempotency_key="k", fingerprint="f")
        [key] = table.redis.keys(table.key("idem", "*"))
        table.redis.set(key, "job_other f")
        await table.jobs.delete(first.job_id, "me")
        assert table.redis.get(key) == "job_other f"


async def test_erased_text_leaves_the_append_only_file(tmp_path, make_request, monkeypatch):
    broker = EmbeddedBroker(tmp_path, 2**27).start()
    try:
        settings = Settings(redis_url=broker.url)
        async with JobStore.open(settings) as jobs:
            job = await jobs.submit(make_request("a secret of long ago"), tenant="me")
            await jobs.delete(job.job_id, "me")
            await jobs.sweep()
            with open_sync(settings) as client:
                assert not client.info("persistence")["aof_rewrite_in_progress"], "not for each DELETE"
                monkeypatch.setattr(erasure, "WITHIN_MS", 0)
                await jobs.sweep()
                while client.info("persistence")["aof_rewrite_in_progress"]:
                    pass
            files = [path.read_bytes() for path in tmp_path.rglob("*.aof")]
            assert files
            assert not any(b"a secret of long ago" in text for text in files)
    finally:
        broker.stop()


class TestOperator:
    @pytest.fixture
    def server(self, tmp_path):
        broker = EmbeddedBroker(tmp_path, 2**27).start()
        yield Settings(redis_url=broker.url, data_dir=tmp_path)
        broker.stop()

    async def test_sees_and_erases_what_a_tenant_has(self, server, make_request, make_response):
        async with JobStore.open(server) as jobs:
            for number in range(3):
                await jobs.submit(make_request(f"s{number}"), tenant="noisy", idempotency_key=str(number))
            worker = TurnStore.open(server, "w")
            turn = worker.claim(1)
            worker.succeed(turn.lease, turn.jobs[0].id, make_response())
            await jobs.submit(make_request("x" * 5_000), tenant="noisy")
            mine = await jobs.submit(make_request("mine"), tenant="quiet")
            use = {use.tenant: use for use in Operator.open(server).tenants()}
            assert (use["noisy"].jobs, use["noisy"].waiting_jobs) == (4, 1)
            assert use["noisy"].kept_bytes > 5_000
            shown = CliRunner().invoke(cli.app, ["jobs", "list", "--data-dir", str(server.data_dir)])
            assert shown.exit_code == 0
            assert "noisy" in shown.output
            done = CliRunner().invoke(
                cli.app, ["jobs", "purge", "noisy", "--yes", "--data-dir", str(server.data_dir)]
            )
            assert (done.exit_code, done.output) == (0, "4 jobs, 0 batches and 0 files of noisy erased\n")
            assert [use.tenant for use in Operator.open(server).tenants()] == ["quiet"]
            assert (await jobs.get(mine.job_id, "quiet")).status == "queued"
            assert (await jobs.stats()).lanes["interactive"].queued_jobs == 1

    async def test_asks_before_it_erases(self, server, make_request):
        async with JobStore.open(server) as jobs:
            await jobs.submit(make_request("s"), tenant="me")
            refused = CliRunner().invoke(
                cli.app, ["jobs", "purge", "me", "--redis-url", server.redis_url], input="n\n"
            )
            assert refused.exit_code == 1
            assert len((await jobs.list_jobs("me")).jobs) == 1


class TestLists:
    @pytest.mark.sabotage(
        "submit",
        "redis.call('ZADD', K('jobs', tenant), age, id)",
        "redis.call('ZADD', K('jobs', tenant), now, id)",
    )
    async def test_jobs_stand_in_the_list_by_the_microsecond(self, table):
        ids = [await table.submit(str(number)) for number in range(5)]
        for job_id in ids:
            rank = float(table.redis.hget(table.key("job", job_id), "rank"))
            assert table.redis.zscore(table.key("jobs", "me"), job_id) == rank

    async def test_newest_first_also_within_a_millisecond_over_pages(self, table):
        ids = [await table.submit(str(number)) for number in range(7)]
        scores = {job_id: 1_764_489_999_123 + number / 1_000 for number, job_id in enumerate(ids)}
        table.redis.zadd(table.key("jobs", "me"), scores)
        listed, cursor = [], None
        while cursor is not None or not listed:
            page = await table.jobs.list_jobs("me", limit=2, cursor=cursor)
            listed += [job.id for job in page.jobs]
            cursor = page.cursor
        assert listed == ids[::-1]
        assert (await table.jobs.list_jobs("me", created_after=1_764_489_999.123)).jobs == ()

    async def test_a_page_looks_at_so_many_jobs_and_goes_on_from_there(self, table, monkeypatch):
        monkeypatch.setattr(listing, "SCAN", 20)
        monkeypatch.setattr(listing, "AT_ONCE", 10)
        wanted = await table.submit("the first", metadata={"is": "wanted"})
        for number in range(30):
            await table.submit(str(number))
        page = await table.jobs.list_jobs("me", metadata={"is": "wanted"})
        assert page.jobs == ()
        rest = await table.jobs.list_jobs("me", metadata={"is": "wanted"}, cursor=page.cursor)
        assert [job.id for job in rest.jobs] == [wanted]


@pytest.mark.sabotage("reap", "if leases[i + 1] - now > most then", "if false then")
async def test_a_clock_that_is_set_back_does_not_keep_the_lease_of_a_dead_worker(table):
    job_id = await table.submit()
    worker = table.worker("dead")
    lease = worker.claim(1).lease
    table.redis.zincrby(table.key("leases"), 3_600_000, lease)
    table.worker().reap()
    left_ms = table.redis.zscore(table.key("leases"), lease) - 1_000 * table.redis.time()[0]
    assert left_ms < 1_000 * (worker.lease_s + 2)
    assert (await table.jobs.get(job_id, "me")).status == "running"


@pytest.mark.sabotage("rate", "K('rate', ARGV[1])", "K('rate', '')")
async def test_requests_are_counted_for_each_key_alone(table):
    for _ in range(3):
        await table.jobs.count_request("one", 60)
    assert (await table.jobs.count_request("other", 60))[0] == 1


def test_the_parts_of_a_states_key_cannot_run_into_each_other():
    parts = [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ('a","b', "", "c"), ("", "ab", "c")]
    groups = {state_group(*part, state) for part in parts for state in ("=s", "=", "s")}
    assert len(groups) == 3 * len(parts)
    assert state_group("m", "r", "t", "]=s") != state_group("m", "r", 't"]', "=s")
