"""Trials of what went wrong in other people's job APIs, one report each, where no other test is the trial."""

import asyncio
import time

import httpx
import pytest

from d3serve.api.app import create_app
from d3serve.errors import StorageUnavailable

pytestmark = pytest.mark.anyio
NOUL = {"type": "noul", "instructions": "x"}


def body(**fields):
    return {"model": "jev-latest", "state": "hello", "questions": {"q": NOUL}} | fields


async def submit(client, **fields):
    answer = await client.post("/v1/jobs", json=body(**fields))
    assert answer.status_code == 202, answer.text
    return answer.json()


async def test_cancel_without_workers_holds_when_a_worker_comes(client, worker):
    """celery/celery#4300: a revocation was lost when the workers were down."""
    job = await submit(client)
    await client.post(job["urls"]["cancel"])
    assert worker.claim().jobs == []


async def test_a_thousand_cancels_of_finished_jobs_harm_nothing(client, worker):
    """celery/celery#2620: revoking finished tasks stopped the consumer."""
    job = await submit(client)
    worker.work()
    answers = await asyncio.gather(*(client.post(job["urls"]["cancel"]) for _ in range(1000)))
    assert {answer.json()["status"] for answer in answers} == {"succeeded"}
    after = await submit(client)
    assert [claimed.id for claimed in worker.work()] == [after["id"]]


async def test_gone_is_told_with_the_time_and_not_as_unknown(client, worker, raw_redis, settings):
    """wlsdml1114/Engui_Studio#21: a 404 was taken for "initialising" for ever."""
    job = await submit(client)
    worker.work()
    expires = (await client.get(job["urls"]["self"])).json()["expires_at"]
    raw_redis.delete(f"d3:{{{settings.namespace}}}:job:{job['id']}")
    gone = (await client.get(job["urls"]["self"])).json()
    assert gone["code"] == "result_expired"
    assert gone["expired_at"] == expires


async def test_what_breaks_inside_is_a_500_that_tells_nothing(app, client, monkeypatch):
    """bentoml/BentoML#5694: an exception left the row half-done. Ours must also not quote what it met."""

    async def broken(*_args, **_options):
        raise RuntimeError("the state was: SECRET")

    monkeypatch.setattr(app.state.parts.store, "submit", broken)
    answer = await client.post("/v1/jobs", json=body())
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert "SECRET" not in answer.text


async def test_the_log_of_what_breaks_holds_no_text_of_the_request(app, client, monkeypatch, capsys):
    async def broken(decision, **_options):
        raise ValueError(decision.state)

    monkeypatch.setattr(app.state.parts.store, "submit", broken)
    await client.post("/v1/jobs", json=body(state="SECRET"))
    logged = capsys.readouterr()
    assert "ValueError" in logged.out + logged.err
    assert "SECRET" not in logged.out + logged.err


async def test_an_unreachable_store_is_a_503_and_the_process_stays_healthy(app, client, monkeypatch):
    """celery/celery#5716: a full or absent Redis meant deadlock or silent loss."""

    async def away(*_args, **_options):
        raise StorageUnavailable("the job table is full")

    for name in ("submit", "get", "stats", "ping"):
        monkeypatch.setattr(app.state.parts.store, name, away)
    for method, path in (
        ("POST", "/v1/jobs"),
        ("GET", "/v1/jobs/x"),
        ("GET", "/v1/queue"),
        ("GET", "/readyz"),
    ):
        answer = await client.request(method, path, json=body() if method == "POST" else None)
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable"), path
        assert answer.headers["retry-after"] == "1"
    assert (await client.get("/healthz")).status_code == 200


async def test_a_full_queue_is_a_429_with_a_time_and_no_job(settings, worker):
    application = create_app(settings.model_copy(update={"max_queued_jobs": 3}))
    async with application.router.lifespan_context(application):
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for number in range(3):
                await submit(client, state=f"state {number}")
            answer = await client.post("/v1/jobs", json=body(state="one too many"))
            assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            worker.work()
            await submit(client, state="there is room again")


async def test_place_and_estimate_in_the_queue_move(client, worker):
    """openstory-so/openstory#828: a queue of 12,654 looked like a hang."""
    jobs = [await submit(client, state=f"state {number}") for number in range(6)]

    async def place(job):
        return (await client.get(job["urls"]["self"])).json()["queue"]

    before = await place(jobs[-1])
    assert before["position"] == 5
    assert before["ahead_tokens"] > 0
    assert before["eta_s"] is not None
    for job in jobs[:3]:
        await client.post(job["urls"]["cancel"])
    after = await place(jobs[-1])
    assert after["position"] == 2
    assert after["ahead_tokens"] < before["ahead_tokens"]
    worker.work()
    assert "queue" not in (await client.get(jobs[-1]["urls"]["self"])).json()


async def test_fifty_identical_calls_at_once_are_one_job(client, take_turns, worker):
    """idempot-dev/idempot-js#182: both ran."""
    with take_turns(delay_s=0.1):
        answers = await asyncio.gather(*(client.post("/v1/systemone", json=body()) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["location"] for answer in answers}) == 1
    assert worker.turns._table.client.hget(worker.turns._key("finished"), "succeeded") == "1"


async def test_a_job_still_waits_when_the_api_stops_and_a_waiter_is_told_to_come_back(settings, worker):
    """Stopping must not hang on a long poll, nor lose the job behind it."""
    application = create_app(settings)
    async with application.router.lifespan_context(application):
        transport = httpx.ASGITransport(application)
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30)
        job = await submit(client)
        poll = asyncio.create_task(client.get(job["urls"]["self"], params={"wait": 20}))
        while not application.state.parts.store._dispatcher._watches:  # noqa: ASYNC110 - nothing tells us
            await asyncio.sleep(0.01)
        began = time.monotonic()
    answer = await poll
    await client.aclose()
    assert time.monotonic() - began < 15
    assert (answer.status_code, answer.json()["status"]) == (200, "queued")
    assert [claimed.id for claimed in worker.work()] == [job["id"]]
