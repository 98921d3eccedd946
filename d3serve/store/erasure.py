"""Takes erased texts out of Redis' append-only file, which otherwise holds them until it has doubled."""

import structlog
from redis.exceptions import ResponseError

from d3serve.store.connect import AsyncClient
from d3serve.store.keys import Keys

WITHIN_MS = 600_000  # so long after a DELETE; one rewrite serves all that came before it

log = structlog.get_logger(__name__)


class Eraser:
    """Lets Redis rewrite its append-only file, at most once in ten minutes, where something was deleted."""

    def __init__(self, client: AsyncClient, key: Keys) -> None:
        self._client = client
        self._key = key

    async def sweep(self) -> None:
        """Begin a rewrite if the first deletion since the last one is old enough.

        A server that bars the command keeps its file as it likes: that is logged.
        """
        erased_ms = await self._client.get(self._key("erased"))
        if erased_ms is None or await self._now_ms() - int(erased_ms) < WITHIN_MS:
            return
        # First, so that a DELETE from now on asks for a rewrite of its own.
        if await self._client.delete(self._key("erased")):
            await self._rewrite(erased_ms)

    async def _rewrite(self, erased_ms: str) -> None:
        try:
            await self._client.bgrewriteaof()
        except ResponseError as error:
            if "in progress" in str(error):  # of a file that may have begun before the DELETE
                await self._client.set(self._key("erased"), erased_ms, nx=True)
            else:
                log.warning("erase.no_rewrite", error=str(error))

    async def _now_ms(self) -> int:
        seconds, micros = await self._client.time()
        return int(seconds) * 1000 + int(micros) // 1000
