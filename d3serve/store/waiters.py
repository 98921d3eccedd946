"""Wakes the coroutines that wait for a job: one pub/sub connection and one task for a whole process."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog
from redis.exceptions import RedisError

from d3serve.schemas import FINAL_STATUSES
from d3serve.store.connect import AsyncClient

RECONNECT_S = 0.2
POLL_S = 1.0
LEAVE_WITHIN_S = 2.0
DELETED = "deleted"

log = structlog.get_logger(__name__)


class Waiter:
    """One coroutine's interest in one job; `event` is set when the job should be read again."""

    def __init__(self, *, final_only: bool) -> None:
        self.event = asyncio.Event()
        self.final_only = final_only


class Dispatcher:
    """Listens to the channel and sets the events of those who registered.

    Pub/sub forgets messages while a connection is down. So register first, then read the job, then wait,
    and read again now and then; after every reconnect all waiters are told to read again.
    """

    def __init__(self, client: AsyncClient, channel: str) -> None:
        self._client = client
        self._channel = channel
        self._waiters: dict[str, set[Waiter]] = defaultdict(set)
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    def start(self) -> None:
        """Begin to listen, in the running event loop."""
        self._task = asyncio.create_task(self._listen(), name="d3serve-dispatcher")

    def release(self) -> None:
        """Wake everybody; `closed` tells them why."""
        self.closed = True
        self._wake_all()

    async def stop(self) -> None:
        """Wake everybody, end the task, and return when nobody waits any more, or soon after."""
        self.release()
        if self._task is not None:
            while not self._task.done():  # redis-py swallows a cancellation that meets it while it connects
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=0.1)
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_WITHIN_S):
                while self._waiters:  # noqa: ASYNC110 - they read the job once more
                    await asyncio.sleep(0.01)

    @contextmanager
    def register(self, job_id: str, *, final_only: bool) -> Iterator[Waiter]:
        """A waiter for as long as the block lasts."""
        waiter = Waiter(final_only=final_only)
        self._waiters[job_id].add(waiter)
        try:
            yield waiter
        finally:
            self._waiters[job_id].discard(waiter)
            if not self._waiters[job_id]:
                del self._waiters[job_id]

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.event.set()

    def _tell(self, message: str) -> None:
        job_id, _, status = message.partition(" ")
        final = status in FINAL_STATUSES or status == DELETED
        for waiter in self._waiters.get(job_id, ()):
            if final or not waiter.final_only:
                waiter.event.set()

    async def _listen(self) -> None:
        while not self.closed:
            try:
                async with self._client.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(self._channel)
                    self._wake_all()
                    while not self.closed:
                        if message := await pubsub.get_message(timeout=POLL_S):
                            self._tell(message["data"])
            except (RedisError, OSError) as error:
                log.warning("dispatcher.reconnect", error=type(error).__name__)
            await asyncio.sleep(RECONNECT_S)
