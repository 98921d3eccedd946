"""Feeders that are killed, stall or meet: no line is lost or doubled, and nobody's batch waits for another's."""

import asyncio
import json
import os
import time

import pytest

from d3serve.api import batch_feeder
from d3serve.api.batch_lines import outcome_of
from d3serve.errors import StorageUnavailable
from d3serve.store import states
from d3serve.store.batches import BatchStep, BatchTerms
from d3serve.store.files import FileStore
from d3serve.store.jobs import JobStore
from d3serve.store.pieces import Pieces

ENDED = ("completed", "failed")
WITHIN_S = 50

pytestmark = pytest.mark.anyio
PREFIX = "d3:{default}:"


@pytest.mark.sabotage("batch_step", "elseif held ~= fence then", "elseif false then")
async def test_a_feeder_that_stalled_past_its_claim_writes_nothing(
    batches, decisions, make_feeder, table, let_claims_run_out, worker
):
    feeder = await make_feeder()
    batch = await batches.start(decisions(5))
    await feeder.work()
    await feeder.work()
    worker.work()
    let_claims_run_out()
    stalled = await table.claim(60)
    let_claims_run_out()
    await feeder.work()
    late = BatchStep(texts={"output": [b"late\n"], "error": []}, sums={"completed": 1}, done=[1])
    assert not await table.step(stalled, late, 0)

    async def work():
        await feeder.work()
        worker.work()

    done = await batches.until(batch, work=work)
    assert done.request_counts.completed == 5
    assert len(await batches.outcomes(done)) == 5


@pytest.mark.sabotage("batch_step", "if last == step then\n  return 1\nelseif", "if")
async def test_a_step_whose_answer_was_lost_is_done_once(
    batches, decisions, make_feeder, table, let_claims_run_out, monkeypatch
):
    await batches.start(decisions(5))
    await (await make_feeder()).work()
    let_claims_run_out()
    claimed = await table.claim(60)
    run = table._table.run

    async def twice(*args):
        assert await run(*args) == 1
        return await run(*args)

    monkeypatch.setattr(table._table, "run", twice)
    once = BatchStep(texts={"output": [b"a line\n"], "error": []}, sums={"completed": 1})
    assert await table.step(claimed, once, 0)
    monkeypatch.undo()
    row = await table._table.send("hgetall", table._key("batch", claimed.id))
    assert (row["completed"], row["output_bytes"]) == ("1", "7")


async def test_a_window_of_lines_waits_and_no_more(batches, decisions, make_feeder, stats):
    feeder = await make_feeder()
    await batches.start(decisions(600))
    for _ in range(5):
        await feeder.work()
        await asyncio.sleep(0.06)
        assert (await stats()).lanes["offline"].queued_jobs <= 256
    assert (await stats()).lanes["offline"].queued_jobs == 256
    assert (await stats()).lanes["interactive"].queued_jobs == 0


async def test_a_window_is_so_many_bytes_at_most_in_any_script(
    batches, decisions, make_feeder, stats, monkeypatch
):
    monkeypatch.setattr("d3serve.api.batch_feeder.WINDOW_BYTES", 3_000)
    lines = decisions(10)
    for line in lines:
        line["body"]["input"] = line["custom_id"] + "猫" * 300
    feeder = await make_feeder()
    await batches.start("\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode())
    await feeder.work()
    await feeder.work()
    assert (await stats()).lanes["offline"].queued_jobs == 3


@pytest.mark.sabotage("batch_claim", "int(math.max(now, head[2]))", "head[2]")
async def test_a_tenant_with_many_batches_gets_every_second_step(batches, decisions, table, raw_redis):
    for _ in range(6):
        await batches.start(decisions(1))
    alone = await batches.start(decisions(1))
    raw_redis.zrem(f"{PREFIX}feed:public", alone.id)
    raw_redis.hset(f"{PREFIX}batch:{alone.id}", "tenant", "other")
    seconds, micros = raw_redis.time()
    now = seconds * 1000 + micros // 1000
    raw_redis.zadd(f"{PREFIX}feed:other", {alone.id: now})
    raw_redis.zadd(f"{PREFIX}feeds", {"other": now})
    tenants = [(await table.claim(60)).tenant for _ in range(3)]
    assert "other" in tenants[:2]


async def test_lines_that_lie_across_pieces_are_read_whole(
    batches, decisions, feeding, take_turns, monkeypatch
):
    monkeypatch.setattr("d3serve.store.files.PIECE_BYTES", 101)
    lines = decisions(12)
    for number, line in enumerate(lines):
        line["custom_id"] = f"{number} 猫{'ü' * number}"
    data = b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(line, ensure_ascii=False).encode() for line in lines)
    with take_turns():
        async with feeding():
            file = await batches.upload(data)
            content = await batches.client.files.content(file.id)
            batch = await batches.client.batches.create(
                input_file_id=file.id, endpoint="/v1/decisions", completion_window="24h"
            )
            done = await batches.until(batch)
    assert content.content == data
    assert await batches.outcomes(done) == sorted(line["custom_id"] for line in lines)


@pytest.fixture
def settings(settings, tmp_path):
    return settings.model_copy(update={"state_dir": tmp_path / "states"})


async def test_large_pieces_are_files_that_go_when_nobody_refers_to_them(
    settings, decisions, table, worker, make_feeder, monkeypatch, let_claims_run_out
):
    for module in ("pieces", "batches"):
        monkeypatch.setattr(f"d3serve.store.{module}.LARGE_BYTES", 2_000)
    upload = await table.files.upload("public")
    await upload.add(b"".join(json.dumps(line).encode() + b"\n" for line in decisions(60)))
    file = await upload.finish("x.jsonl", "batch", None)
    made = await table.create("public", BatchTerms(file.id, "/v1/decisions", None, None))
    feeder = await make_feeder()
    worker.turns.max_batch_questions = 7  # so that outcomes come in several steps
    async with asyncio.timeout(WITHIN_S):
        while (batch := await table.get(made.id, "public")).status not in ENDED:
            let_claims_run_out()
            await feeder.work()
            worker.work()
    files = [path for path in settings.state_dir.rglob("*") if path.is_file()]
    assert len(files) >= 3, "no piece of the output has moved"
    states_folder = await table._table.send("get", table._table.key("folder"))
    assert {path.parent.name for path in files}.isdisjoint({states_folder}), "an older API would sweep them"
    output = await table.files.get(batch.files["output"], "public")
    text = b"".join([piece async for piece in table.files.contents(output)])
    assert len(text) == output.bytes
    assert len({json.loads(line)["custom_id"] for line in text.splitlines()}) == 60
    for path in files:
        os.utime(path, (0, time.time() - states.GRACE_S - 1))
    async with JobStore.open(settings) as jobs:
        await jobs.sweep()
        assert all(path.exists() for path in files), "a piece that a file has was swept"
        for one in (file.id, output.id):
            await table.files.delete(one, "public")
        jobs._states._sweep_at = 0
        await jobs.sweep()
    assert [path for path in files if path.exists()] == []


async def test_files_leave_half_of_what_a_tenant_may_keep_to_its_jobs(client, monkeypatch):
    monkeypatch.setattr(FileStore, "max_kept_bytes", 1_000)
    form = {"data": {"purpose": "batch"}}
    taken = await client.post("/v1/files", files={"file": ("a", b"x" * 800)}, **form)
    assert taken.status_code == 200
    refused = await client.post("/v1/files", files={"file": ("b", b"x" * 201)}, **form)
    assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
    assert (await client.delete(f"/v1/files/{taken.json()['id']}")).status_code == 200
    assert (await client.post("/v1/files", files={"file": ("b", b"x" * 201)}, **form)).status_code == 200


async def test_no_line_is_refused_for_a_model_that_all_workers_left_meanwhile(
    batches, decisions, make_feeder, worker, monkeypatch, let_claims_run_out, stats
):
    feeder = await make_feeder(
        model="another"
    )  # the API's and the feeder's own default need not be what is served
    lines = decisions(3)
    for line in lines:
        line["body"]["model"] = worker.model.name
    batch = await batches.start(lines)
    await feeder.work()
    live = JobStore.models
    calls = []

    async def models(self):
        calls.append(1)
        return await live(self) if len(calls) == 1 else []

    monkeypatch.setattr(JobStore, "models", models)
    monkeypatch.setattr("d3serve.api.served.REFRESH_S", 0.0)
    let_claims_run_out()
    await feeder.work()
    assert len(calls) > 1
    assert (await stats()).lanes["offline"].queued_jobs == 0
    monkeypatch.undo()

    async def work():
        let_claims_run_out()
        await feeder.work()
        worker.work()

    done = await batches.until(batch, work=work)
    assert (done.request_counts.completed, done.request_counts.failed) == (3, 0)


async def test_an_answer_that_cannot_be_written_fails_its_line_alone(
    batches, decisions, feeding, take_turns, monkeypatch
):
    def breaks(endpoint, label, *rest):
        if "line-1" in label:
            raise ZeroDivisionError
        return outcome_of(endpoint, label, *rest)

    monkeypatch.setattr(batch_feeder, "outcome_of", breaks)
    with take_turns():
        async with feeding():
            done = await batches.until(await batches.start(decisions(3)))
    assert (done.status, done.request_counts.completed) == ("completed", 2)
    [row] = await batches.rows(done.error_file_id)
    assert (row["custom_id"], row["response"]["body"]["error"]["code"]) == ("line-1", "internal_error")


async def test_a_feeder_that_is_told_to_stop_does_not_read_an_input_to_its_end(
    batches, decisions, make_feeder, monkeypatch
):
    monkeypatch.setattr("d3serve.store.files.PIECE_BYTES", 2_000)
    batch = await batches.start(decisions(100))
    feeder, stop, read = await make_feeder(), asyncio.Event(), []
    get = Pieces.get

    async def told_to_stop(self, name):
        read.append(name)
        stop.set()
        return await get(self, name)

    monkeypatch.setattr(Pieces, "get", told_to_stop)
    await feeder.run(stop)
    assert len(read) <= 2
    assert (await batches.client.batches.retrieve(batch.id)).status == "validating"
    assert await (await make_feeder()).work(), "it was not given back"
    assert (await batches.client.batches.retrieve(batch.id)).status == "in_progress"


async def test_what_is_gathered_is_written_though_nothing_more_is_taken(
    batches, decisions, make_feeder, worker, monkeypatch, let_claims_run_out
):
    """A job table that is nearly full of answers is emptied by gathering them."""
    feeder = await make_feeder()
    batch = await batches.start(decisions(300))
    await feeder.work()
    await feeder.work()
    worker.work()

    async def full(*_args, **_options):
        raise StorageUnavailable("the job table is 91% full")

    monkeypatch.setattr(JobStore, "submit", full)
    let_claims_run_out()
    await feeder.work()
    assert (await batches.client.batches.retrieve(batch.id)).request_counts.completed > 0
