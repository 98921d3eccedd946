"""What one caller may have under way at once, and what becomes of it when its key goes."""

import asyncio
import contextlib
import json
import time

import httpx
import pytest

from d3serve.api import budget, calls
from d3serve.api.app import create_app
from d3serve.api.budget import BodyBudget, BodyBytes
from d3serve.api_keys import append_key, new_key
from d3serve.errors import Overloaded, RateLimited
from d3serve.store.jobs import JobStore

pytestmark = pytest.mark.anyio
BODY = {"model": "jev-latest", "state": "hello", "questions": {"q": {"type": "noul", "instructions": "x"}}}


@pytest.fixture
def keys(tmp_path):
    """A key file, and the keys of two tenants."""
    path, made = tmp_path / "keys.jsonl", {}
    for tenant in ("acme", "globex"):
        made[tenant], line = new_key(tenant)
        append_key(path, line)
    return path, made


@pytest.fixture
def keyed_service(settings, keys, serving):
    with serving(create_app(settings.model_copy(update={"api_keys_file": keys[0]}))) as address:
        yield lambda tenant: httpx.AsyncClient(
            base_url=address, headers={"Authorization": f"Bearer {keys[1][tenant]}"}, timeout=30
        )


async def _follow(client, job):
    async with client.stream("GET", job["urls"]["events"]) as answer:
        return [line async for line in answer.aiter_lines()]


async def test_what_a_key_holds_open_ends_with_the_key(keyed_service, keys, worker):
    path, _ = keys
    async with keyed_service("acme") as acme, keyed_service("globex") as globex:
        job = (await acme.post("/v1/jobs", json=BODY)).json()
        theirs = (await globex.post("/v1/jobs", json=BODY)).json()
        held = [
            asyncio.create_task(acme.get(job["urls"]["self"], params={"wait": 30})),
            asyncio.create_task(acme.post("/v1/jobs", json=BODY, headers={"Prefer": "wait=30"})),
            asyncio.create_task(acme.post("/v1/systemone", json=BODY)),
            asyncio.create_task(acme.post("/v1/decisions", json=BODY)),
        ]
        stream = asyncio.create_task(_follow(acme, job))
        others = asyncio.create_task(globex.get(theirs["urls"]["self"], params={"wait": 30}))
        await asyncio.sleep(0.5)  # all are held by now; one that is not gets 401 all the same
        path.write_text("\n".join(line for line in path.read_text().split("\n") if '"acme"' not in line))
        began = time.monotonic()
        answers = await asyncio.gather(*held)
        lines = await stream
        assert time.monotonic() - began < 20, "they ended by themselves"
        assert [(one.status_code, one.json()["code"]) for one in answers] == [(401, "unauthorized")] * 4
        assert not any("answer" in line for line in lines)
        worker.work()
        assert (await others).json()["status"] == "succeeded", "another's key has not changed"


async def test_a_call_ends_with_its_key_though_its_cancellation_is_lost(keyed_service, keys, monkeypatch):
    """redis-py swallows one that meets it while it connects: an event stream went on for ever without its key."""
    waiting, lost = asyncio.Event(), asyncio.Event()

    async def deaf(*_):
        waiting.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        lost.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(JobStore, "wait", deaf)
    monkeypatch.setattr(calls, "CHECK_KEYS_EVERY_S", 0.05)
    async with keyed_service("acme") as acme:
        job = (await acme.post("/v1/jobs", json=BODY)).json()
        held = asyncio.create_task(acme.get(job["urls"]["self"], params={"wait": 30}))
        while not waiting.is_set():  # noqa: ASYNC110 - it is another thread's
            await asyncio.sleep(0.01)
        keys[0].write_text("")
        assert (await held).status_code == 401
    assert lost.is_set()


@pytest.mark.parametrize("limit", ["MAX_CALLS", "MAX_STREAMS"])
async def test_one_caller_holds_so_many_and_another_goes_on(limit, keyed_service, monkeypatch):
    monkeypatch.setattr(calls, limit, 3)
    async with keyed_service("acme") as acme, keyed_service("globex") as globex:
        job = (await acme.post("/v1/jobs", json=BODY)).json()
        path = job["urls"]["events" if limit == "MAX_STREAMS" else "self"]
        opened = [acme.build_request("GET", path, params={"wait": 3}) for _ in range(4)]
        waiting = [asyncio.create_task(acme.send(request, stream=True)) for request in opened]
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.ALL_COMPLETED)
        statuses = sorted(task.result().status_code for task in done)
        assert statuses == [200, 200, 200, 429]
        refused = next(task.result() for task in done if task.result().status_code == 429)
        told = json.loads(await refused.aread())
        assert told["code"] == "rate_limited"
        assert "3" in told["detail"]
        assert "retry-after" in refused.headers
        assert (await globex.get("/v1/jobs")).status_code == 200
        for task in done:
            await task.result().aclose()
        async with asyncio.timeout(60):
            while (await acme.head(path)).status_code == 429:  # noqa: ASYNC110 - nothing tells us
                await asyncio.sleep(0.05)


async def test_bodies_of_all_come_to_no_more_than_the_budget_and_of_one_to_half(settings):
    bodies = BodyBudget(1000)
    first, second = BodyBytes(bodies, "a"), BodyBytes(bodies, "a")
    first.take(300)
    with pytest.raises(RateLimited, match="500 bytes"):
        second.take(201)
    second.take(200)
    BodyBytes(bodies, "b").take(400)
    with pytest.raises(Overloaded, match="1,000 bytes"):
        BodyBytes(bodies, "c").take(101)
    first.give_back()
    first.give_back()
    assert bodies.held_bytes == 600
    largest = settings.max_body_bytes
    assert BodyBudget.of(settings.model_copy(update={"max_body_bytes": 2**30})).share_bytes >= 2 * 2**30
    assert BodyBudget.of(settings).share_bytes >= 2 * largest, "a body that may be sent has to fit"


async def test_bodies_beyond_the_budget_are_refused_for_now_and_given_back(settings, serving, monkeypatch):
    """Sixty bodies of 0.3 MB that decode to 47 MB took 7.6 GB."""
    monkeypatch.setattr(budget, "LEAST_BYTES", 100_000)
    monkeypatch.setattr(budget, "BODIES_AT_ONCE", 0)
    application = create_app(settings)
    text = json.dumps(BODY | {"state": "x" * 60_000}).encode()
    with serving(application) as address:
        async with httpx.AsyncClient(base_url=address) as client:
            answer = await client.post("/v1/jobs", content=text)
            assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
            assert "50,000 bytes" in answer.json()["detail"]
            for _ in range(3):
                assert (await client.post("/v1/jobs", json=BODY)).status_code == 202
            async with asyncio.timeout(60):
                while application.state.parts.body_budget.held_bytes:  # noqa: ASYNC110 - given back after the answer
                    await asyncio.sleep(0.01)
