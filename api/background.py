"""Work that outlives a response: wake-ups to send, the sweep that runs when no worker does."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import structlog

from d3serve.errors import StorageUnavailable
from d3serve.schemas import Lane
from d3serve.store.connect import end_tasks
from d3serve.store.jobs import JobStore
from d3serve.wake.celery_app import WakeSender

log = structlog.get_logger("d3serve.api")
SWEEP_EVERY_S: Final = 5.0
DRAIN_S: Final = 5.0


class Background:
    """Tasks of one API process, kept from the garbage collector and given time to end at shutdown."""

    def __init__(self, store: JobStore, send_wake: WakeSender) -> None:
        self._store = store
        self._send_wake = send_wake
        self._tasks: set[asyncio.Task[Any]] = set()
        self._endless: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Background":
        """Start the sweep."""
        self.keep(self._sweep())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let tasks end for a few seconds, then cancel what is left."""
        await end_tasks(self._endless)
        await asyncio.gather(*self._endless, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DRAIN_S)
            for task in list(self._tasks):
                task.cancel()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` beside the response."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def wake(self, lane: Lane) -> None:
        """Tell the workers of a lane that there is work, beside the response; a sweep repairs a lost wake-up."""
        self.start(asyncio.to_thread(self._send_wake, lane))

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which has no end, until the process stops."""
        self._endless.append(asyncio.create_task(work))

    async def _sweep(self) -> None:
        """Overdue jobs expire and dead leases go back, even while no worker lives to see to it."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                for lane in await self._store.sweep():
                    self.wake(lane)
            except StorageUnavailable as error:
                log.warning("sweep.failed", reason=error.message)
            except Exception as error:  # a sweep that breaks must not be the last one
                log.error("sweep.unforeseen", kind=type(error).__name__, exc_info=error)
