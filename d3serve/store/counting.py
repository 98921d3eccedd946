"""Requests to count tokens, from the API to a worker and back: hashes and lists that are gone within seconds.

No job stands behind them, so nothing here is kept, taken twice or tried again: who asked in vain asks again.
"""

import secrets
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from pydantic import ValidationError

from d3serve.errors import NoWorker, Overloaded, RateLimited, StorageUnavailable
from d3serve.schemas import Lane
from d3serve.schemas.counting import Count, CountRequest
from d3serve.settings import Settings
from d3serve.store.census import Census
from d3serve.store.connect import AsyncRedisClient, RedisClient, open_sync
from d3serve.store.encode import EncodedRequest
from d3serve.store.table import AsyncStore, Table

WITHIN_S: Final = 10.0  # a worker counts a text for the longest prompt in one
LOOK_S: Final = 0.5  # a look blocks a connection, and must end before its socket's patience does
MAX_WAITING: Final = 16  # each may be a body of the largest
MAX_OF_TENANT: Final = MAX_WAITING // 2  # in one API process, so that no tenant locks out the others


@dataclass(frozen=True)
class Estimate:
    """Seconds at today's rate: before a job would begin, and then until it is done."""

    queue_s: float
    work_s: float


class CountDesk(AsyncStore):
    """The API's side. Raises StorageUnavailable when Redis is away or full."""

    def __init__(self, client: AsyncRedisClient, settings: Settings) -> None:
        super().__init__(client, settings)
        self._census = Census(self._table)
        self._asking = Counter[str]()  # requests under way, by tenant

    async def count(
        self, request: EncodedRequest, *, tenant: str, revision: str = "", traceparent: str | None = None
    ) -> Count:
        """Have a worker count; with `revision`, one that serves that; in the trace of `traceparent`.

        Raises:
            RateLimited: the tenant has as many requests under way here as one may.
            Overloaded: as many requests wait to be counted as may.
            NoWorker: none has answered within ten seconds.
        """
        if self._asking[tenant] >= MAX_OF_TENANT:
            raise RateLimited(f"{MAX_OF_TENANT} requests to count are under way already; ask again")
        self._asking[tenant] += 1
        try:
            told: dict[str, str | bytes] = {
                "tenant": tenant, "model": request.model, "lane": request.options.lane or "",
                "state": request.state, "questions": request.questions, "traceparent": traceparent or "",
            }  # fmt: skip
            return await self._ask(told, self._table.key("counts", revision))
        finally:
            self._asking[tenant] -= 1
            if not self._asking[tenant]:
                del self._asking[tenant]

    async def _ask(self, request: dict[str, str | bytes], waiting: str) -> Count:
        request_id = secrets.token_hex(16)
        if await self._table.send("llen", waiting) >= MAX_WAITING:  # before bytes are sent for nothing
            raise _full()
        try:
            if await self._put(request_id, request, waiting) > MAX_WAITING:
                raise _full()
            found = await self._answer(request_id)
        finally:  # of a request that was answered nothing is there
            await self._take_back(request_id, waiting)
        if found is None:
            raise NoWorker(f"no worker has counted this within {WITHIN_S:g} s")
        return Count.model_validate_json(found)

    async def _put(self, request_id: str, request: dict[str, str | bytes], waiting: str) -> int:
        """Let workers see a request; how many wait now. Its texts go as they are: to write 16 MiB anew takes long."""
        key = self._table.key("count", request_id)
        async with self._table.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=request)
            pipe.expire(key, round(WITHIN_S))
            pipe.rpush(waiting, request_id)
            pipe.expire(waiting, round(WITHIN_S))
            return int((await pipe.execute())[2])

    async def _take_back(self, request_id: str, waiting: str) -> None:
        with suppress(StorageUnavailable):  # it goes by itself within seconds
            async with self._table.pipeline() as pipe:
                pipe.lrem(waiting, 1, request_id)
                pipe.delete(self._table.key("count", request_id))
                await pipe.execute()

    async def _answer(self, request_id: str) -> str | None:
        until = time.monotonic() + WITHIN_S
        while time.monotonic() < until:
            taken = await self._table.send(
                "execute_command", "BLPOP", self._table.key("counted", request_id), LOOK_S
            )
            if taken:
                return str(taken[1])
        return None

    async def estimate(self, lane: Lane, tenant: str, tokens: int) -> Estimate | None:
        """When a job of so many tokens would be done that came now; None where no worker has told its speed."""
        speeds = [worker.tokens_per_s for worker in await self._census.workers() if worker.tokens_per_s]
        if not speeds:
            return None
        ahead = await self._census.ahead_of(lane, tenant, tokens)
        one = sum(speeds) / len(speeds)
        return Estimate(round(ahead / sum(speeds), 2), round(tokens / one, 2))


class CountQueue:
    """A worker's side. Raises StorageUnavailable when Redis is away or full."""

    def __init__(self, client: RedisClient, settings: Settings) -> None:
        self._table = Table(client, settings.namespace)

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Make one on `settings.redis_url`; it connects on first use."""
        return cls(open_sync(settings, patience_s=0), settings)

    def take(self, revision: str) -> tuple[str, CountRequest] | None:
        """Wait half a second for a request, of those for any worker and those for this revision: its id, and it."""
        lists = {self._table.key("counts"), self._table.key("counts", revision)}
        taken = self._table.send("execute_command", "BLPOP", *sorted(lists), LOOK_S)
        if not taken:
            return None
        key = self._table.key("count", taken[1])
        with self._table.pipeline() as pipe:
            pipe.hgetall(key)
            pipe.delete(key)
            found, _ = pipe.execute()
        try:
            return taken[1], CountRequest.model_validate(found)
        except ValidationError:  # it was taken back; and others may write to Redis too
            return None

    def answer(self, request_id: str, found: Count) -> None:
        """Tell who asked."""
        key = self._table.key("counted", request_id)
        with self._table.pipeline(transaction=True) as pipe:  # a list without its end would stay for ever
            pipe.rpush(key, found.model_dump_json())
            pipe.expire(key, round(WITHIN_S))
            pipe.execute()


def _full() -> Overloaded:
    return Overloaded(f"{MAX_WAITING} requests wait to be counted already")
