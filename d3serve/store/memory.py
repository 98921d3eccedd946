"""Refuses new jobs before Redis is full, so that there is always room to finish the old ones."""

import time

from redis.exceptions import ResponseError

from d3serve.errors import StorageUnavailable
from d3serve.store.connect import storage_errors
from d3serve.store.table import AsyncTable

HIGH_WATER = 0.9
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
                memory = await self._client.info("memory")
            except (
                ResponseError
            ):  # barred on some managed servers: then the first write of SUBMIT is the guard
                return 0.0
        limit = int(memory.get("maxmemory", 0))
        return int(memory["used_memory"]) / limit if limit else 0.0
