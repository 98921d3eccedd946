"""Files and batches with the stock openai client: a real API, a real feeder, a worker driven by hand."""

import json

import openai
import pytest

pytestmark = pytest.mark.anyio


async def test_a_batch_answers_each_line_once_and_tells_of_those_at_fault(
    batches, decisions, take_turns, feeding
):
    lines = decisions(20)
    lines[3]["body"]["questions"] = [{"type": "nonsense"}]
    lines[7]["body"]["model"] = "no-such-model"
    with take_turns():
        async with feeding():
            made = await batches.start(lines, metadata={"run": "night"})
            assert (made.object, made.status, made.completion_window) == ("batch", "validating", "24h")
            done = await batches.until(made)
    assert (done.status, done.metadata) == ("completed", {"run": "night"})
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 18, 2)
    assert done.usage.input_tokens == 18 * 20
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    answered, refused = await batches.rows(done.output_file_id), await batches.rows(done.error_file_id)
    wanted = {f"line-{number}" for number in range(20)}
    assert sorted(row["custom_id"] for row in answered + refused) == sorted(wanted)
    for row in answered:
        assert (row["response"]["status_code"], row["error"]) == (200, None)
        assert row["response"]["body"]["answers"] == [
            {"name": "net", "type": "predicate", "probability": 0.75}
        ]
    told = {row["custom_id"]: row["response"] for row in refused}
    assert told["line-3"]["body"]["error"]["code"] == "invalid_question"
    assert (told["line-3"]["status_code"], told["line-7"]["status_code"]) == (422, 404)


async def test_a_batch_for_system_one_has_its_bodies(batches, take_turns, feeding):
    asked = {"q": {"type": "choice", "criteria": {"a": None, "b": None}}}
    lines = [
        {"custom_id": "x", "method": "POST", "url": "/v1/systemone",
         "body": {"model": "jev-latest", "state": {"name": "naïve 猫"}, "questions": asked}},
    ]  # fmt: skip
    with take_turns():
        async with feeding():
            done = await batches.until(await batches.start(lines, endpoint="/v1/systemone"))
    [row] = await batches.rows(done.output_file_id)
    assert row["response"]["body"]["answers"]["q"]["choice"] == "b"
    assert done.error_file_id is None


async def test_what_is_wrong_with_an_input_is_told_by_line(batches, decisions, feeding):
    lines = decisions(6)
    lines[1]["custom_id"] = "line-0"
    lines[2]["url"] = "/v1/systemone"
    lines[3]["method"] = "GET"
    del lines[4]["custom_id"]
    broken = b"\n".join([*(json.dumps(line).encode() for line in lines), b'{"custom_id": NaN}', b"", b"[]"])
    async with feeding():
        failed = await batches.until(await batches.start(broken))
        empty = await batches.until(await batches.start(b"\n\n"))
    assert failed.status == "failed"
    assert [(one.line, one.param) for one in failed.errors.data] == [
        (2, "custom_id"), (3, "url"), (4, "method"), (5, "custom_id"), (7, None), (9, None),
    ]  # fmt: skip
    assert "line 1 " in failed.errors.data[0].message
    assert (failed.output_file_id, failed.error_file_id, failed.request_counts.total) == (None, None, 0)
    assert (empty.status, empty.errors.data[0].message) == ("failed", "the file has no requests")


async def test_a_batch_without_one_answer_has_failed(batches, decisions, feeding):
    lines = decisions(3)
    for line in lines:
        line["body"]["model"] = "no-such-model"
    async with feeding():
        done = await batches.until(await batches.start(lines))
    assert (done.status, done.errors.data[0].code) == ("failed", "all_requests_failed")
    assert len(await batches.rows(done.error_file_id)) == 3


async def test_canceling_keeps_what_is_answered_and_tells_of_the_rest(
    batches, decisions, make_feeder, worker
):
    feeder = await make_feeder()
    batch = await batches.start(decisions(400))
    assert await feeder.work()  # validates
    assert await feeder.work()  # feeds a window
    answered = len(worker.work())
    assert 0 < answered <= 256
    told = await batches.client.batches.cancel(batch.id)
    assert (told.status, told.cancelling_at > 0) == ("cancelling", True)
    done = await batches.until(batch, work=feeder.work)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == (
        "cancelled", answered, 400 - answered,
    )  # fmt: skip
    out, rest = await batches.rows(done.output_file_id), await batches.rows(done.error_file_id)
    assert len({row["custom_id"] for row in out + rest}) == len(out + rest) == 400
    assert {row["error"]["code"] for row in rest} == {"batch_cancelled"}
    assert (await batches.client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_batch_that_expires_tells_of_what_was_not_done(
    batches, decisions, make_feeder, worker, raw_redis
):
    feeder = await make_feeder()
    batch = await batches.start(decisions(300))
    await feeder.work()
    await feeder.work()
    worker.finish(worker.claim())
    raw_redis.hset(f"d3:{{default}}:batch:{batch.id}", "expires", 1)
    done = await batches.until(batch, work=feeder.work)
    assert done.status == "expired"
    assert done.request_counts.completed + done.request_counts.failed == 300
    rows = await batches.rows(done.error_file_id)
    assert {row["error"]["code"] for row in rows} == {"batch_expired"}


async def test_files_are_listed_read_and_erased(batches, decisions, raw_redis):
    first, second = await batches.upload(decisions(2)), await batches.upload(decisions(3))
    assert (first.object, first.purpose, first.filename, first.status) == (
        "file",
        "batch",
        "requests.jsonl",
        "processed",
    )
    assert [one.id async for one in await batches.client.files.list(limit=1)] == [second.id, first.id]
    assert (await batches.client.files.retrieve(first.id)).bytes == first.bytes
    assert [row["custom_id"] for row in await batches.rows(second.id)] == ["line-0", "line-1", "line-2"]
    assert (await batches.client.files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await batches.client.files.retrieve(first.id)
    assert [one.id async for one in await batches.client.files.list()] == [second.id]
    assert int(raw_redis.hget("d3:{default}:kept", "public")) == second.bytes


async def test_a_file_that_a_batch_reads_stays_until_the_batch_is_over(
    batches, decisions, feeding, take_turns
):
    file = await batches.upload(decisions(2))
    batch = await batches.client.batches.create(
        input_file_id=file.id, endpoint="/v1/decisions", completion_window="24h"
    )
    with pytest.raises(openai.ConflictError) as refused:
        await batches.client.files.delete(file.id)
    assert refused.value.code == "job_not_finished"
    with take_turns():
        async with feeding():
            await batches.until(batch)
    assert (await batches.client.files.delete(file.id)).deleted


async def test_a_client_that_asks_again_makes_no_second_batch(batches, decisions):
    """The API may be killed between the batch and its answer; the stock client then asks again, and says so."""
    file = await batches.upload(decisions(1))
    asked = {"input_file_id": file.id, "endpoint": "/v1/decisions", "completion_window": "24h"}
    first = await batches.client.batches.create(**asked)
    again = {"extra_headers": {"x-stainless-retry-count": "1"}}
    assert (await batches.client.batches.create(**asked, **again)).id == first.id
    other = await batches.client.batches.create(**asked, metadata={"a": "b"}, **again)
    meant = await batches.client.batches.create(**asked)
    assert len({first.id, other.id, meant.id}) == 3
    keyed = {"extra_headers": {"Idempotency-Key": "tonight"}}
    made = [await batches.client.batches.create(**asked, **keyed) for _ in range(2)]
    assert made[0].id == made[1].id
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        await batches.client.batches.create(**asked, metadata={"a": "b"}, **keyed)
    assert refused.value.code == "idempotency_key_reused"
    assert len([one async for one in await batches.client.batches.list()]) == 4


async def test_batches_are_listed_newest_first(batches, decisions):
    made = [await batches.start(decisions(1)) for _ in range(3)]
    listed = [one.id async for one in await batches.client.batches.list(limit=2)]
    assert listed == [one.id for one in reversed(made)]


@pytest.mark.parametrize(
    ("data", "fields", "status", "param"),
    [
        (b"", {"purpose": "batch"}, 422, "file"),
        (b"{}\n\xff", {"purpose": "batch"}, 422, "file"),
        (b"{}", {"purpose": "assistants"}, 422, "purpose"),
        (b"{}", {"purpose": "batch", "expires_after[anchor]": "created_at"}, 422, "expires_after.seconds"),
        (b"{}", {"purpose": "batch", "other": "x"}, 422, "other"),
        (b"{}", {"purpose": "batch", "file": "x"}, 422, "file"),
        (b"{}", {}, 422, "purpose"),
        (json.dumps({"custom_id": "猫"}).encode("utf-16"), {"purpose": "batch"}, 422, "file"),
    ],
)
async def test_an_upload_at_fault_is_refused_and_leaves_nothing(
    client, raw_redis, data, fields, status, param
):
    answer = await client.post("/v1/files", data=fields, files={"file": ("a.jsonl", data)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert raw_redis.keys("*:piece:*") == raw_redis.keys("*:file:*") == raw_redis.keys("*:kept") == []


async def test_a_tenant_has_its_own_files_and_batches_alone(batches, decisions, raw_redis):
    batch = await batches.start(decisions(1))
    raw_redis.hset(f"d3:{{default}}:batch:{batch.id}", "tenant", "another")
    raw_redis.hset(f"d3:{{default}}:file:{batch.input_file_id}", "tenant", "another")
    for asked in (
        batches.client.batches.retrieve(batch.id), batches.client.batches.cancel(batch.id),
        batches.client.files.retrieve(batch.input_file_id), batches.client.files.content(batch.input_file_id),
        batches.client.files.delete(batch.input_file_id),
        batches.client.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/decisions", completion_window="24h"
        ),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            await asked
