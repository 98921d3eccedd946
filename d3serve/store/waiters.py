"""Wakes the coroutines that wait for a job: one pub/sub connection and one task for a whole process."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import structlog
from redis.exceptions import RedisError

from d3serve.errors import StorageUnavailable
from d3serve.schemas import FINAL_STATUSES
from d3serve.store.connect import AsyncRedisClient, end_tasks
from d3serve.store.records import JobRecord

RECONNECT_S = 0.2
POLL_S = 1.0
REREAD_S = 1.0
MAX_LOOKS_PER_S = 500  # of one process, however many jobs are waited for
LEAVE_WITHIN_S = 2.0
DELETED = "deleted"
Changes = AsyncGenerator[JobRecord | None, None]

log = structlog.get_logger(__name__)


class Waiter:
    """One coroutine's interest in one job; `event` is set when there is news of it, or it should be read again."""

    def __init__(self, *, final_only: bool) -> None:
        self.event = asyncio.Event()
        self.final_only = final_only
        self._job: JobRecord | None = None

    def tell(self, job: JobRecord | None) -> None:
        """Wake the coroutine, unless it waits for the end and this is none; None: it must look itself."""
        if job is None or job.done or not self.final_only:
            self._job = job
            self.event.set()

    def take(self) -> JobRecord | None:
        """The job as last told, once."""
        self.event.clear()
        job, self._job = self._job, None
        return job


class WatchedJob:
    """A job that somebody waits for: read once for all of them, when word of it comes, and now and then."""

    def __init__(self, read: Callable[[], Awaitable[JobRecord]], every_s: Callable[[], float]) -> None:
        self.waiters: set[Waiter] = set()
        self.look = asyncio.Event()
        self._read = read
        self._every_s = every_s
        self._ended = False
        self.task = asyncio.create_task(self._keep_looking())

    def end(self) -> None:
        """Look no more."""
        self._ended = (
            True  # a cancellation may be lost: in redis-py while it connects, in `wait_for` of Python 3.11
        )
        self.task.cancel()

    async def _keep_looking(self) -> None:
        known: JobRecord | None = None
        while not self._ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.look.wait(), self._every_s())
            self.look.clear()
            present = set(self.waiters)  # who comes while this is read will read something newer
            try:
                job = await self._read()
            except StorageUnavailable:
                await asyncio.sleep(RECONNECT_S)
                continue
            except Exception:  # gone, or a bug: whoever waits reads it and is told
                job = None
            if job is None or job != known:
                for waiter in present & self.waiters:
                    waiter.tell(job)
            known = job


class Dispatcher:
    """Listens to the channel and wakes those who registered.

    Pub/sub forgets messages while a connection is down. So register first, then read the job, then wait; a watched
    job is read again now and then, once for all of its waiters, and after every reconnect all are told to read again.
    """

    def __init__(self, client: AsyncRedisClient, channel: str) -> None:
        self._client = client
        self._channel = channel
        self._watches: dict[str, WatchedJob] = {}
        self._looks: set[asyncio.Task[None]] = set()  # also of watches that have been told to end
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
        """Wake everybody, and return when nobody waits any more, or soon after; nothing is read from then on."""
        self.release()
        if self._task is not None:
            await end_tasks([self._task])
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_WITHIN_S):
                while self._watches:  # noqa: ASYNC110 - they read the job once more
                    await asyncio.sleep(0.01)
        await end_tasks(self._looks)

    @contextmanager
    def register(
        self, job_id: str, read: Callable[[], Awaitable[JobRecord]], *, final_only: bool
    ) -> Iterator[Waiter]:
        """A waiter for as long as the block lasts; `read` reads the job for all of its waiters."""
        watch = self._watches.get(job_id)
        if watch is None:
            watch = self._watches[job_id] = WatchedJob(read, self._look_every_s)
            self._looks.add(watch.task)
            watch.task.add_done_callback(self._looks.discard)
        waiter = Waiter(final_only=final_only)
        watch.waiters.add(waiter)
        try:
            yield waiter
        finally:
            watch.waiters.discard(waiter)
            if not watch.waiters:
                watch.end()
                del self._watches[job_id]

    def _look_every_s(self) -> float:
        """A second, or longer where many jobs are waited for: looking is only for words that were lost."""
        return max(REREAD_S, len(self._watches) / MAX_LOOKS_PER_S)

    def _wake_all(self) -> None:
        for watch in self._watches.values():
            for waiter in watch.waiters:
                waiter.tell(None)

    def _tell(self, message: str) -> None:
        job_id, _, status = message.partition(" ")
        watch = self._watches.get(job_id)
        if watch is None:
            return
        final = status in FINAL_STATUSES or status == DELETED
        if final or not all(waiter.final_only for waiter in watch.waiters):
            watch.look.set()

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
