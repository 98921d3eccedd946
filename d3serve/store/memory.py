"""How full Redis is: new jobs are refused before the old ones lack room, and what is kept for readers far earlier."""

import time
from collections.abc import Mapping
from typing import Any

from redis.exceptions import ResponseError

from d3serve.errors import StorageUnavailable
from d3serve.store.connect import storage_errors
from d3serve.store.table import AsyncTable, Table

HIGH_WATER = 0.9
ROOMY = 0.25  # what nobody needs any more may fill so much of it, and never the room of what waits
CHECK_EVERY_S = 1.0


class MemoryGuard:
    """Asks Redis at most once a second how full it is."""

    def __init__(self, table: AsyncTable) -> None:
        self._client = table.client
        self._share = 0.0
        self._until = 0.0

    async def admit(self) -> None:
        """Return when there is room.

        Raises:
            StorageUnavailable: over 90 % of maxmemory is used.
        """
        now = time.monotonic()
        if now >= self._until:
            self._until = now + CHECK_EVERY_S  # one asks, and not each of those that come meanwhile
            try:
                self._share = await self._used_share()
            except BaseException:
                self._until = 0.0
                raise
        if self._share > HIGH_WATER:
            raise StorageUnavailable(f"the job table is {self._share:.0%} full; waiting jobs go first")

    async def _used_share(self) -> float:
        with storage_errors():
            try:
                return _share(await self._client.info("memory"))
            except (
                ResponseError
            ):  # barred on some managed servers: then the first write of SUBMIT is the guard
                return 0.0


class SpareRoom:
    """Tells workers, who ask Redis at most once a second, whether there is room for what has its answer."""

    def __init__(self, table: Table) -> None:
        self._client = table.client
        self._is_there = False
        self._until = 0.0

    def is_there(self) -> bool:
        """Whether a quarter of maxmemory is not used yet.

        Raises:
            StorageUnavailable: Redis is away.
        """
        now = time.monotonic()
        if now >= self._until:
            with storage_errors():
                try:
                    self._is_there = _share(self._client.info("memory")) <= ROOMY
                except ResponseError:  # barred: the tenant's own bound is all there is
                    self._is_there = True
            self._until = now + CHECK_EVERY_S
        return self._is_there


def _share(memory: Mapping[str, Any]) -> float:
    """The share of maxmemory that is used; 0 without one."""
    limit = int(memory.get("maxmemory", 0))
    return int(memory["used_memory"]) / limit if limit else 0.0
