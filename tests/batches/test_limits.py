"""How large and how long: lines, uploads that break off, files that run out, inputs that are lost."""

import asyncio
import json
import socket

import openai
import pytest

from d3serve.errors import StorageUnavailable
from d3serve.store.jobs import JobStore
from d3serve.store.operate import Operator
from d3serve.store.table import AsyncTable

pytestmark = pytest.mark.anyio
PREFIX = "d3:{default}:"
DAY_S = 86_400


async def test_more_lines_or_longer_ones_than_there_may_be_fail_the_batch(
    batches, decisions, feeding, monkeypatch
):
    monkeypatch.setattr("d3serve.api.batch_lines.MAX_LINES", 3)
    monkeypatch.setattr("d3serve.store.files.PIECE_BYTES", 5_000)
    long = decisions(3)
    long[1]["body"]["input"] = "x" * 70_000
    async with feeding(max_body_bytes=65_536):
        many = await batches.until(await batches.start(decisions(4)))
        wide = await batches.until(await batches.start(long))
        enough = await batches.until(await batches.start(decisions(3)), "in_progress")
    assert [(one.line, one.message) for one in many.errors.data] == [(4, "there are more than 3 requests")]
    assert [(one.line, one.message) for one in wide.errors.data] == [
        (2, "the line is longer than 65,536 bytes")
    ]
    assert enough.request_counts.total == 3


async def test_a_hundred_findings_are_told_and_no_more(batches, feeding):
    async with feeding():
        done = await batches.until(await batches.start(b"[]\n" * 500))
    assert [one.line for one in done.errors.data] == list(range(1, 101))


async def test_blank_lines_have_an_end_too(batches, decisions, feeding, monkeypatch):
    """Two hundred million of them fit into a file, and reading them would keep a feeder from everybody else's."""
    monkeypatch.setattr("d3serve.api.batch_lines.MAX_LINES_IN_ALL", 1_000)
    line = json.dumps(decisions(1)[0]).encode()
    async with feeding():
        many = await batches.until(await batches.start(b" \n" * 1_000 + line + b"\n\n"))
        enough = await batches.until(await batches.start(b"\r\n" * 999 + line), "in_progress")
    assert [(one.line, one.message) for one in many.errors.data] == [
        (1_001, "there are more than 1,000 lines, blank ones included")
    ]
    assert enough.request_counts.total == 1


async def test_a_file_too_long_is_refused_before_it_comes(client, raw_redis, monkeypatch):
    monkeypatch.setattr("d3serve.api.bounds.MAX_UPLOAD_BYTES", 1_000)
    monkeypatch.setattr("d3serve.store.files.MAX_FILE_BYTES", 400)
    monkeypatch.setattr("d3serve.store.files.PIECE_BYTES", 100)

    async def endless():
        pytest.fail("the body was read")
        yield b""

    form = {"content-type": "multipart/form-data; boundary=x", "content-length": "1001"}
    early = await client.post("/v1/files", headers=form, content=endless())
    late = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x" * 401)})
    for refused in (early, late):
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, "file")
    assert raw_redis.keys("*:piece:*") == []


async def test_batches_count_in_what_their_tenant_keeps_until_they_are_gone(
    batches, decisions, feeding, take_turns, settings, raw_redis
):
    """Else a loop that makes and cancels them would fill the server."""
    file = await batches.upload(decisions(1))
    asked = {"input_file_id": file.id, "endpoint": "/v1/decisions", "completion_window": "24h"}
    batch = await batches.client.batches.create(**asked, metadata={"a": "b" * 500})
    kept = f"{PREFIX}kept"
    assert int(raw_redis.hget(kept, "public")) > file.bytes + 1_500
    before = raw_redis.hget(kept, "public")
    raw_redis.hset(kept, "public", settings.max_kept_bytes_per_tenant - 100)
    with pytest.raises(openai.RateLimitError) as refused:
        await batches.client.batches.create(**asked)
    assert refused.value.code == "quota_exceeded"
    assert [one.id async for one in await batches.client.batches.list()] == [batch.id]
    raw_redis.hset(kept, "public", before)
    with take_turns():
        async with feeding():
            await batches.until(batch)
    [row] = [one for one in raw_redis.zrange(f"{PREFIX}holds", 0, -1) if one.startswith(batch.id)]
    seconds, _ = raw_redis.time()
    assert 29 * DAY_S < raw_redis.zscore(f"{PREFIX}holds", row) / 1000 - seconds < 30 * DAY_S + 1
    raw_redis.delete(f"{PREFIX}batch:{batch.id}")
    raw_redis.zadd(f"{PREFIX}holds", {row: 1})
    async with JobStore.open(settings) as jobs:
        await jobs.sweep()
    assert raw_redis.zscore(f"{PREFIX}holds", row) is None
    assert raw_redis.exists(f"{PREFIX}batches:public") == 0


async def test_who_has_as_many_files_as_he_may_makes_no_batch(batches, decisions, monkeypatch):
    """A batch leaves two, and many batches may be made of one input."""
    file = await batches.upload(decisions(1))
    monkeypatch.setattr("d3serve.store.files.MAX_FILES", 1)
    with pytest.raises(openai.RateLimitError, match="1 files already"):
        await batches.client.batches.create(
            input_file_id=file.id, endpoint="/v1/decisions", completion_window="24h"
        )


async def test_an_upload_that_breaks_off_leaves_nothing(service, raw_redis, monkeypatch):
    monkeypatch.setattr("d3serve.store.files.PIECE_BYTES", 1_000)
    host, port = service.removeprefix("http://").split(":")
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"
        "Content-Type: multipart/form-data; boundary=xyz\r\n\r\n"
        '--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + b"x" * 50_000)
        async with asyncio.timeout(30):
            while len(raw_redis.keys("*:piece:*")) < 40:  # noqa: ASYNC110 # in Redis
                await asyncio.sleep(0.01)
    async with asyncio.timeout(30):
        while raw_redis.keys("*:piece:*"):  # noqa: ASYNC110 # in Redis
            await asyncio.sleep(0.01)
    assert raw_redis.keys("*:file:*") == raw_redis.keys("*:kept") == raw_redis.keys("*:holds") == []


async def test_a_piece_whose_upload_was_killed_runs_out_within_the_hour(table, raw_redis):
    upload = await table.files.upload("public")
    await upload.add(b"x" * 5 * 2**20)
    [piece] = raw_redis.keys("*:piece:*")
    assert 3_000_000 < raw_redis.pttl(piece) <= 3_600_000


async def test_a_file_whose_end_was_not_heard_of_is_taken_back_whole(client, raw_redis, monkeypatch):
    """Else a list of files would name one that has no contents."""
    run = AsyncTable.run

    async def lost(self, name, *args):
        answer = await run(self, name, *args)
        if name == "file_add":
            raise StorageUnavailable("gone before it answered")
        return answer

    monkeypatch.setattr(AsyncTable, "run", lost)
    answer = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"{}")})
    assert answer.status_code == 503
    assert raw_redis.keys("*:piece:*") == raw_redis.keys("*:file*:*") == raw_redis.keys("*:kept") == []


async def test_a_file_is_kept_as_long_as_it_says_and_a_batch_needs_a_day_of_it(batches, decisions, raw_redis):
    kept = await batches.upload(decisions(1))
    assert kept.expires_at - kept.created_at == 7 * DAY_S
    brief = await batches.upload(decisions(1), expires_after={"anchor": "created_at", "seconds": DAY_S})
    assert brief.expires_at - brief.created_at == DAY_S
    assert 0 < raw_redis.pttl(f"{PREFIX}file:{brief.id}") <= DAY_S * 1000
    with pytest.raises(openai.UnprocessableEntityError, match="25 hours"):
        await batches.client.batches.create(
            input_file_id=brief.id, endpoint="/v1/decisions", completion_window="24h"
        )


async def test_output_is_kept_as_long_as_the_batch_says(batches, decisions, feeding, take_turns, raw_redis):
    with take_turns():
        async with feeding():
            more = {"output_expires_after": {"anchor": "created_at", "seconds": 2 * DAY_S}}
            done = await batches.until(await batches.start(decisions(1), **more))
    output = await batches.client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.expires_at - output.created_at) == ("batch_output", 2 * DAY_S)
    ttls = [raw_redis.pttl(piece) for piece in raw_redis.keys("*:piece:*")]
    assert all(0 < ttl <= 7 * DAY_S * 1000 for ttl in ttls)
    left = {key.split(":")[2] for key in raw_redis.keys(f"{PREFIX}*") if raw_redis.ttl(key) == -1}
    assert not left & {"flight", "labels", "feed", "batch", "file", "piece", "job", "body", "res", "idem"}


async def test_what_has_run_out_is_no_longer_counted(batches, decisions, settings, raw_redis):
    await batches.upload(decisions(3))
    assert int(raw_redis.hget(f"{PREFIX}kept", "public")) > 0
    [held] = raw_redis.zrange(f"{PREFIX}holds", 0, -1)
    raw_redis.zadd(f"{PREFIX}holds", {held: 1})
    async with JobStore.open(settings) as jobs:
        await jobs.sweep()
    assert raw_redis.hget(f"{PREFIX}kept", "public") is None


async def test_a_batch_whose_input_is_lost_ends_and_keeps_what_is_answered(
    batches, decisions, make_feeder, worker, raw_redis, monkeypatch, let_claims_run_out
):
    monkeypatch.setattr("d3serve.api.batch_feeder.WINDOW", 5)
    feeder = await make_feeder()
    batch = await batches.start(decisions(20))
    await feeder.work()
    let_claims_run_out()
    await feeder.work()
    answered = len(worker.work())
    raw_redis.delete(*raw_redis.keys("*:piece:*"))
    feeder = await make_feeder()  # which has not read them

    async def work():
        let_claims_run_out()
        await feeder.work()

    done = await batches.until(batch, work=work)
    assert (done.status, done.errors.data[0].code) == ("failed", "not_found")
    assert (done.request_counts.completed, done.request_counts.failed) == (answered, 5 - answered)
    assert len(await batches.rows(done.output_file_id)) == answered > 0
    assert all(row["error"]["code"] == "batch_failed" for row in await batches.rows(done.error_file_id))


async def test_of_a_file_that_has_gone_an_answer_says_so_before_it_begins(batches, decisions, raw_redis):
    file = await batches.upload(decisions(1))
    raw_redis.delete(*raw_redis.keys("*:piece:*"))
    with pytest.raises(openai.NotFoundError):
        await batches.client.files.content(file.id)


async def test_a_line_that_its_tenant_erases_is_told_of(
    batches, decisions, make_feeder, worker, let_claims_run_out
):
    feeder = await make_feeder()
    batch = await batches.start(decisions(2))
    await feeder.work()
    let_claims_run_out()
    await feeder.work()
    [first, _] = (await batches.client.get("/jobs", cast_to=object))["data"]
    await batches.client.delete(f"/jobs/{first['id']}", cast_to=type(None))

    async def work():
        worker.work()
        let_claims_run_out()
        await feeder.work()

    done = await batches.until(batch, work=work)
    [row] = await batches.rows(done.error_file_id)
    assert (row["response"]["status_code"], json.dumps(row).count("result_expired") > 0) == (410, True)
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)


async def test_an_operator_erases_all_that_a_tenant_has(
    batches, decisions, make_feeder, worker, settings, raw_redis, let_claims_run_out, monkeypatch
):
    monkeypatch.setattr("d3serve.api.batch_feeder.WINDOW", 5)
    feeder = await make_feeder()
    for _ in range(2):  # one ends, one is under way
        await batches.start(decisions(8))
    for _ in range(8):
        let_claims_run_out()
        await feeder.work()
        worker.work()
    await batches.upload(decisions(1))
    erased = await asyncio.to_thread(Operator.open(settings).purge, "public")
    assert (erased.batches, erased.files >= 3) == (2, True)
    left = {key.split(":")[2] for key in raw_redis.keys(f"{PREFIX}*")}
    assert not left & {
        "file",
        "files",
        "piece",
        "batch",
        "batches",
        "flight",
        "labels",
        "feed",
        "job",
        "body",
        "st",
    }
    assert raw_redis.hget(f"{PREFIX}kept", "public") is None
    let_claims_run_out()
    assert not await feeder.work()
