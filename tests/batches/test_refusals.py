"""What is refused is told as OpenAI's client reads it; and cancel is taken in every state."""

import openai
import pytest

pytestmark = pytest.mark.anyio
PREFIX = "d3:{default}:"
ASKED = {"endpoint": "/v1/decisions", "completion_window": "24h"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/chat/completions"}, "endpoint"),
        ({"endpoint": "/v1/decisions/"}, "endpoint"),
        ({"endpoint": ""}, "endpoint"),
        ({"completion_window": "24H"}, "completion_window"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"input_file_id": ""}, "input_file_id"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3_599}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3_600}}, "output_expires_after"),
        ({"extra_body": {"priority": "high"}}, "priority"),
    ],
)
async def test_a_batch_at_fault_is_refused_with_the_field_that_is(
    batches, decisions, changes, param, raw_redis
):
    file = await batches.upload(decisions(1))
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        await batches.client.batches.create(**{"input_file_id": file.id} | ASKED | changes)
    error = refused.value.body
    assert error["param"].partition(".")[0] == param
    assert error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert raw_redis.keys(f"{PREFIX}batch*") == []


async def test_pages_are_turned_as_openai_does(batches, decisions):
    files = [(await batches.upload(decisions(1))).id for _ in range(5)]
    listed = batches.client.files.list
    assert [one.id async for one in await listed(limit=2, order="asc", purpose="batch")] == files
    assert [one.id async for one in await listed(limit=2, after=files[3])] == files[2::-1]
    assert [one.id async for one in await listed(purpose="batch_output")] == []
    page = await listed(limit=5)
    assert (page.has_more, page.data[0].id, page.data[-1].id) == (False, files[4], files[0])
    assert (await listed(limit=4)).has_more
    for lists in (listed, batches.client.batches.list):
        for wrong in ({"limit": 0}, {"limit": 10_001}):
            with pytest.raises(openai.UnprocessableEntityError, match="limit") as refused:
                await lists(**wrong)
            assert refused.value.param == "limit"
        with pytest.raises(openai.NotFoundError) as refused:
            await lists(after="nothing-of-this-name")
        assert refused.value.param == "after"


@pytest.mark.parametrize("state", ["validating", "in_progress", "expired", "completed", "failed"])
async def test_cancel_is_taken_in_every_state_and_again(
    batches, decisions, make_feeder, worker, raw_redis, let_claims_run_out, state, monkeypatch
):
    monkeypatch.setattr("d3serve.api.batch_feeder.WINDOW", 4)
    feeder = await make_feeder()

    async def work():
        let_claims_run_out()
        await feeder.work()

    batch = await batches.start(b"[]" if state == "failed" else decisions(9))
    if state != "validating":
        await work()
        await work()
        worker.work()
    if state == "expired":
        raw_redis.hset(f"{PREFIX}batch:{batch.id}", "expires", 1)
        await work()
    if state == "completed":

        async def answer():
            await work()
            worker.work()

        await batches.until(batch, work=answer)
    first = await batches.client.batches.cancel(batch.id)
    again = await batches.client.batches.cancel(batch.id)
    done = await batches.until(batch, work=work)
    over = state in ("completed", "failed", "expired")
    assert first.status == again.status == (done.status if over else "cancelling")
    assert done.status == (state if over else "cancelled")
    assert (await batches.client.batches.cancel(batch.id)) == done
    counts = done.request_counts
    assert counts.completed + counts.failed == counts.total == {"validating": 0, "failed": 0}.get(state, 9)
    assert await batches.outcomes(done) == sorted(f"line-{number}" for number in range(counts.total))
    left = {key.split(":")[2] for key in raw_redis.keys(f"{PREFIX}*")}
    assert not left & {"flight", "labels", "feed", "line", "lease"}
    assert (await batches.client.files.delete(batch.input_file_id)).deleted, "the file is still held"


async def test_the_name_of_a_file_is_kept_whole_or_refused(batches):
    upload = batches.client.files.create
    name = "猫 ü" * 85 + "y"
    assert (await upload(file=(name, b"{}"), purpose="batch")).filename == name
    with pytest.raises(openai.UnprocessableEntityError, match="256 characters") as refused:
        await upload(file=(name + "x", b"{}"), purpose="batch")
    assert refused.value.param == "file"
