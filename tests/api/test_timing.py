"""`Server-Timing`: where a finished job's time went, in the numbers that its own record holds."""

import asyncio

import pytest

pytestmark = pytest.mark.anyio
BODY = {"model": "jev-latest", "state": "hello", "questions": {"q": {"type": "noul", "instructions": "x"}}}


def spans(answer):
    """The header as milliseconds by name."""
    rows = [row.strip().partition(";dur=") for row in answer.headers["server-timing"].split(",")]
    return {name: float(ms) for name, _, ms in rows}


@pytest.fixture
async def finished(client, worker, monkeypatch):
    """A job that waited and ran for a moment, in a pass of 12.3 ms."""
    succeed = worker.turns.succeed
    monkeypatch.setattr(worker.turns, "succeed", lambda *args, **more: succeed(*args, 12.3, **more))
    job = (await client.post("/v1/jobs", json=BODY)).json()
    assert set(spans(await client.get(job["urls"]["self"]))) == {"total"}
    turn = worker.claim()
    await asyncio.to_thread(worker.turns.progress, turn.lease, "deciding", [job["id"]])
    worker.finish(turn)
    return job


@pytest.mark.parametrize("where", ["self", "result"])
async def test_a_finished_job_says_how_long_it_waited_and_ran(client, finished, where):
    answer = await client.get(finished["urls"][where])
    told = spans(answer)
    assert list(told) == ["queue", "turn", "pass", "total"]
    job = (await client.get(finished["urls"]["self"])).json()
    assert told["queue"] == pytest.approx((job["started_at"] - job["created_at"]) * 1000, abs=1)
    assert told["turn"] == pytest.approx((job["finished_at"] - job["started_at"]) * 1000, abs=1)
    assert told["pass"] == 12.3
    assert told["total"] > 0


async def test_a_retried_job_forgets_the_times_of_its_first_run(client, worker, settings, raw_redis):
    job = (await client.post("/v1/jobs", json=BODY)).json()
    worker.fail(worker.claim(), "device_error", "x")
    assert set(spans(await client.get(job["urls"]["self"]))) == {"queue", "turn", "total"}
    raw_redis.hset(f"d3:{{{settings.namespace}}}:job:{job['id']}", "pass_ms", "5")
    await client.post(f"{job['urls']['self']}/retry")
    assert set(spans(await client.get(job["urls"]["self"]))) == {"total"}
    worker.work()
    assert "pass" not in spans(await client.get(job["urls"]["self"]))


@pytest.mark.parametrize("path", ["/v1/systemone", "/v1/decisions"])
async def test_a_synchronous_answer_says_it_too_and_its_parts_fit_into_the_whole(client, take_turns, path):
    with take_turns(delay_s=0.05):
        told = spans(await client.post(path, json=BODY))
    assert told["turn"] >= 45
    assert told["queue"] + told["turn"] <= told["total"] + 2  # both are whole milliseconds of Redis' clock
