"""Requests to count tokens, from the API to a worker and back: two lists that are gone within seconds.

No job stands behind them, so nothing here is kept, taken twice or tried again: who asked in vain asks again.
"""

import secrets
import time
from dataclasses import dataclass
from typing import Final, Self

from pydantic import ValidationError

from d3serve.errors import NoWorker, Overloaded
from d3serve.schemas import Lane
from d3serve.schemas.counting import Count, CountRequest
from d3serve.settings import Settings
from d3serve.store.census import Census
from d3serve.store.connect import AsyncRedisClient, RedisClient, open_async, open_sync
from d3serve.store.encode import EncodedRequest
from d3serve.store.table import AsyncTable, Table

WITHIN_S: Final = 10.0  # a worker counts a text for the longest prompt in one
LOOK_S: Final = 0.5  # a look blocks a connection, and must end before its socket's patience does
MAX_WAITING: Final = 16  # each may be a body of the largest


@dataclass(frozen=True)
class Estimate:
    """Seconds at today's rate: before a job would begin, and then until it is done."""

    queue_s: float
    work_s: float


class CountDesk:
    """The API's side. Raises StorageUnavailable when Redis is away or full."""

    def __init__(self, client: AsyncRedisClient, settings: Settings) -> None:
        self._table = AsyncTable(client, settings.namespace)
        self._census = Census(self._table)

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Make one on `settings.redis_url`; it connects on first use."""
        return cls(open_async(settings), settings)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._table.close()

    async def count(self, request: EncodedRequest, *, tenant: str, revision: str = "") -> Count:
        """Have a worker count; with `revision`, one that serves that.

        Raises:
            Overloaded: as many requests wait to be counted as may.
            NoWorker: none has answered within ten seconds.
        """
        asked = CountRequest(
            id=secrets.token_hex(16),
            tenant=tenant,
            model=request.model,
            lane=request.options.lane or "",
            state=request.state.decode(),
            questions=request.questions.decode(),
        )
        waiting, text = self._table.key("counts", revision), asked.model_dump_json()
        if await self._table.send("llen", waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests wait to be counted already")
        async with self._table.pipeline(transaction=True) as pipe:
            pipe.rpush(waiting, text)
            pipe.expire(waiting, round(WITHIN_S))
            await pipe.execute()
        found = await self._answer(asked.id)
        if found is None:
            await self._table.send("lrem", waiting, 1, text)
            raise NoWorker(f"no worker has counted this within {WITHIN_S:g} s")
        return Count.model_validate_json(found)

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

    def take(self, revision: str) -> CountRequest | None:
        """Wait half a second for a request, of those for any worker and those for this revision."""
        lists = {self._table.key("counts"), self._table.key("counts", revision)}
        taken = self._table.send("execute_command", "BLPOP", *sorted(lists), LOOK_S)
        try:
            return CountRequest.model_validate_json(taken[1]) if taken else None
        except ValidationError:  # others may write to Redis too
            return None

    def answer(self, request_id: str, found: Count) -> None:
        """Tell who asked."""
        key = self._table.key("counted", request_id)
        with self._table.pipeline() as pipe:
            pipe.rpush(key, found.model_dump_json())
            pipe.expire(key, round(WITHIN_S))
            pipe.execute()
