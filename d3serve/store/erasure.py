"""Takes erased texts out of Redis' append-only file, which otherwise holds them until it has doubled."""

import structlog
from redis.exceptions import ResponseError

from d3serve.store.connect import storage_errors
from d3serve.store.table import AsyncTable

WITHIN_MS = 600_000  # so long after a DELETE; one rewrite serves all that came before it

log = structlog.get_logger(__name__)


class Eraser:
    """Lets Redis rewrite its append-only file, at most once in ten minutes, where something was deleted."""

    def __init__(self, table: AsyncTable) -> None:
        self._table = table
        self._erased = table.key("erased")

    async def sweep(self) -> None:
        """Begin a rewrite if the first deletion since the last one is old enough.

        A server that bars the command keeps its file as it likes: that is logged.
        """
        erased_ms = await self._table.send("get", self._erased)
        if erased_ms is None or await self._table.now_us() // 1000 - int(erased_ms) < WITHIN_MS:
            return
        # First, so that a DELETE from now on asks for a rewrite of its own.
        if await self._table.send("delete", self._erased):
            await self._rewrite(erased_ms)

    async def _rewrite(self, erased_ms: str) -> None:
        with storage_errors():
            try:
                await self._table.client.bgrewriteaof()
            except ResponseError as error:
                if "in progress" in str(error):  # of a file that may have begun before the DELETE
                    await self._table.client.set(self._erased, erased_ms, nx=True)
                else:
                    log.warning("erase.no_rewrite", error=str(error))
