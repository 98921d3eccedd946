"""An event stream that its client leaves: what it watched is let go at once, not by the garbage collector."""

import asyncio
import contextlib
import gc

import httpx
import pytest

from d3serve.api.app import create_app
from d3serve.api.events import EventStream, stream
from d3serve.store.jobs import JobStore

pytestmark = pytest.mark.anyio
BODY = {"model": "jev-latest", "state": "hello", "questions": {"q": {"type": "noul", "instructions": "x"}}}


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_a_stream_is_let_go_though_its_cancellation_is_lost(settings, serving, monkeypatch):
    """redis-py swallows one that meets it while it connects, as it does in a burst of streams."""
    get, reading, lost = JobStore.get, asyncio.Event(), asyncio.Event()

    async def deaf(store, job_id, tenant):
        job = await get(store, job_id, tenant)
        if store._dispatcher._watches:  # the stream itself reads
            reading.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            lost.set()
        return job

    monkeypatch.setattr(JobStore, "get", deaf)
    application = create_app(settings)
    with serving(application) as address:
        async with httpx.AsyncClient(base_url=address, timeout=30) as client, asyncio.timeout(60):
            job = (await client.post("/v1/jobs", json=BODY)).json()
            async with client.stream("GET", job["urls"]["events"]):
                while not reading.is_set():  # noqa: ASYNC110 - it is another thread's
                    await asyncio.sleep(0.01)
            while application.state.parts.store._dispatcher._watches:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.01)
    assert lost.is_set()


async def test_a_stream_is_let_go_though_it_was_being_sent():
    """Its client reads slowly and leaves: the text waited where it had yielded, and so did all beneath it."""
    told, left = asyncio.Event(), asyncio.Event()

    async def changes():
        try:
            while True:
                yield None
        finally:
            left.set()

    async def send(message):
        if message["type"] == "http.response.body":
            told.set()
            await asyncio.Event().wait()

    async def receive():
        await told.wait()
        return {"type": "http.disconnect"}

    held = changes()  # the collector never has it
    answer = EventStream(stream(held, None, (0, 0, 0)))
    async with asyncio.timeout(30):
        await answer({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    assert left.is_set()
    await held.aclose()
