"""Pieces of files: stored like large states, in the folder of states or in Redis, and swept with them.

`piece:<name>` holds `=text`, or `@<file> <bytes>` in its place. A piece is a run of whole characters.
"""

import asyncio
import hashlib
from typing import Any, Final

from d3serve.errors import NotFound
from d3serve.settings import Settings
from d3serve.store.states import LARGE_BYTES, REFERENCE, StateFolder, piece_folder, queue_folder
from d3serve.store.table import AsyncTable

PIECE_BYTES: Final = 4 * 2**20  # of an upload: what a process holds of it, twice
UNNAMED_TTL_S: Final = 3_600  # of a piece whose file does not exist yet: no upload takes so long


def piece_name(file_id: str, number: int) -> str:
    """The name of a piece, of the form that names of states have; pieces count from 1."""
    return hashlib.sha256(f"{file_id} {number}".encode()).hexdigest()[:40]


def piece_names(file_id: str, count: int) -> list[str]:
    """The names of a file's pieces, in their order."""
    return [piece_name(file_id, number) for number in range(1, count + 1)]


class Pieces:
    """Reads and writes pieces. Raises StorageUnavailable where Redis or the disk is away or full."""

    def __init__(self, table: AsyncTable, settings: Settings) -> None:
        self._table = table
        self._files = StateFolder(settings.state_dir) if settings.state_dir else None
        self._folder = ""

    async def put(self, name: str, tenant: str, text: bytes, max_bytes: int) -> Any:
        """Store a piece, for an hour unless its file comes to be; PIECE_PUT's answer."""
        value = await self._moved(name, text) or b"=" + text
        return await self._table.run("piece_put", name, tenant, value, 1000 * UNNAMED_TTL_S, max_bytes)

    async def get(self, name: str) -> str:
        """The text of a piece.

        Raises:
            NotFound: there is none.
            StateLost: it is no longer in the folder.
        """
        value = await self._table.send("get", self._table.key("piece", name))
        if value is None:
            raise NotFound("the file is no longer kept")
        if not value.startswith(REFERENCE):
            return str(value[1:])
        if self._files is None:
            raise NotFound("this process has no folder of states, and the file is in one")
        return await asyncio.to_thread(self._files.read, value)

    async def move(self, name: str, batch: str, fence: int) -> None:
        """Move a piece that grows no more from Redis to the folder, if there is one and it is worth it."""
        if self._files is not None and (
            reference := await self._moved(name, (await self.get(name)).encode())
        ):
            await self._table.run("piece_move", name, reference, batch, fence)  # else the sweep removes it

    async def _moved(self, name: str, text: bytes) -> str | None:
        """The reference to a new file with this text; None where Redis is to hold it."""
        if self._files is None or len(text) < LARGE_BYTES:
            return None
        self._folder = self._folder or piece_folder(await queue_folder(self._table))
        return await asyncio.to_thread(self._files.write, self._folder, name, text)
