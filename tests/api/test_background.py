"""Work beside the responses: the sweep goes on whatever happens, and what was started gets time to end."""

import asyncio
import queue

import pytest

from d3serve.api import background
from d3serve.api.background import Background
from d3serve.errors import StorageUnavailable

pytestmark = pytest.mark.anyio


class Store:
    """Its sweep fails in two ways, then works; `worked` is set then."""

    def __init__(self):
        self.troubles = [StorageUnavailable("away"), RuntimeError("a bug")]
        self.worked = asyncio.Event()

    async def sweep(self):
        if self.troubles:
            raise self.troubles.pop(0)
        self.worked.set()
        return ["offline"]


async def test_the_sweep_outlives_its_own_failures(monkeypatch):
    monkeypatch.setattr(background, "SWEEP_EVERY_S", 0.001)
    store = Store()
    woken = queue.SimpleQueue()
    async with Background(store, woken.put):
        await asyncio.wait_for(store.worked.wait(), 60)
    assert woken.get(timeout=60) == "offline"


async def test_what_was_started_ends_before_the_process_does_unless_it_hangs(monkeypatch):
    monkeypatch.setattr(background, "DRAIN_S", 0.5)
    ended = []

    async def quick():
        await asyncio.sleep(0.01)
        ended.append("quick")

    async with Background(Store(), print) as beside:
        beside.start(quick())
        beside.start(asyncio.sleep(3600))
    assert ended == ["quick"]


async def test_it_ends_though_a_cancellation_is_lost(monkeypatch):
    """redis-py swallows one that meets it while it connects: an API that was told to stop then stayed."""
    monkeypatch.setattr(background, "SWEEP_EVERY_S", 0.001)
    sweeping, lost = asyncio.Event(), asyncio.Event()

    class Connecting:
        async def sweep(self):
            sweeping.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost.is_set():
                    raise
                lost.set()
            return []

    beside = await Background(Connecting(), print).__aenter__()
    await sweeping.wait()
    await asyncio.wait_for(beside.__aexit__(), 10)
    assert lost.is_set()
