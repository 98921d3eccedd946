"""Files that clients upload and that batches leave: rows in Redis, contents in pieces (docs/adr/0013)."""

import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

from d3serve.errors import (
    BodyTooLarge,
    InvalidRequest,
    JobNotFinished,
    NotFound,
    QuotaExceeded,
    StorageUnavailable,
)
from d3serve.settings import Settings
from d3serve.store.memory import MemoryGuard
from d3serve.store.pieces import PIECE_BYTES, Pieces, piece_name, piece_names
from d3serve.store.table import AsyncTable

MAX_FILE_BYTES: Final = 200_000_000  # OpenAI's 200 MB
MAX_FILES: Final = 1_000  # of a tenant, so that a list of them has an end
LEAST_TTL_S: Final = 2 * 86_400  # a batch may take a day, and its answers must outlast a night
FILES_SHARE: Final = 2  # of what a tenant may keep, files take half: jobs need the rest
PAGE: Final = 100


@dataclass(frozen=True)
class FileRecord:
    """One file; `pieces` is how many it has. Times are seconds since the epoch."""

    id: str
    tenant: str
    purpose: str
    name: str
    bytes: int
    pieces: int
    created_at: float
    expires_at: float

    @classmethod
    def from_hash(cls, file_id: str, row: Mapping[str, str]) -> Self:
        """The record of the hash `file:<id>`."""
        return cls(
            id=file_id, tenant=row["tenant"], purpose=row["purpose"], name=row["name"], bytes=int(row["bytes"]),
            pieces=int(row["pieces"]), created_at=int(row["created"]) / 1000, expires_at=int(row["expires"]) / 1000,
        )  # fmt: skip


class FileStore:
    """Raises StorageUnavailable when Redis is unreachable or full; a tenant sees only what is its own."""

    def __init__(self, table: AsyncTable, settings: Settings) -> None:
        self._table = table
        self._settings = settings
        self.pieces = Pieces(table, settings)
        self.memory = MemoryGuard(table)

    @property
    def ttl_s(self) -> int:
        """How long a file is kept where nobody says: as long as a result may be, two days at least."""
        return max(LEAST_TTL_S, self._settings.max_result_ttl_s)

    @property
    def max_kept_bytes(self) -> int:
        """What a tenant may keep, jobs and all, with a file that it uploads."""
        return self._settings.max_kept_bytes_per_tenant // FILES_SHARE

    async def upload(self, tenant: str) -> "Upload":
        """Begin a file. Raises like `check_count`."""
        await self.check_count(tenant)
        return Upload(self._table, self, tenant)

    async def check_count(self, tenant: str) -> None:
        """Return if the tenant may have more files.

        Raises:
            QuotaExceeded: it has as many as it may.
        """
        if (count := await self._count(tenant)) >= MAX_FILES:
            raise QuotaExceeded(
                f"there are {count} files already; delete some", details={"limit": MAX_FILES, "used": count}
            )

    async def get(self, file_id: str, tenant: str) -> FileRecord:
        """Read the row of a file.

        Raises:
            NotFound: the tenant has none of this id, or no longer.
        """
        row = await self._table.send("hgetall", self._table.key("file", file_id))
        if not row or row["tenant"] != tenant:
            raise NotFound("no such file, or no longer", field="file_id")
        return FileRecord.from_hash(file_id, row)

    async def contents(self, file: FileRecord) -> AsyncIterator[bytes]:
        """The contents of a file, a piece at a time.

        Raises:
            NotFound: it was deleted, or has run out, meanwhile.
            StateLost: it is no longer in the folder of states.
        """
        for name in piece_names(file.id, file.pieces):
            yield (await self.pieces.get(name)).encode()

    async def page(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, oldest_first: bool
    ) -> tuple[list[FileRecord], bool]:
        """Files after the one of the id `after`, and whether there are more.

        Raises:
            NotFound: there is no file `after`.
        """
        found = [one for one in await self._all(tenant) if purpose in (None, one.purpose)]
        found = found if oldest_first else found[::-1]
        if after is not None:
            places = [place for place, one in enumerate(found) if one.id == after]
            if not places:
                raise NotFound("no such file, or no longer", field="after")
            found = found[places[0] + 1 :]
        return found[:limit], len(found) > limit

    async def delete(self, file_id: str, tenant: str) -> None:
        """Erase a file.

        Raises:
            NotFound: as for `get`.
            JobNotFinished: a batch that has not ended reads it.
        """
        file = await self.get(file_id, tenant)
        answer = await self._table.run("file_drop", file_id, tenant, *piece_names(file_id, file.pieces))
        if answer == 0:
            raise NotFound("no such file, or no longer", field="file_id")
        if answer == -1:
            raise JobNotFinished(
                "a batch that has not ended reads this file; cancel it first", field="file_id"
            )

    async def _count(self, tenant: str) -> int:
        count = int(await self._table.send("zcard", self._table.key("files", tenant)))
        return count if count < MAX_FILES else len(await self._all(tenant))

    async def _all(self, tenant: str) -> list[FileRecord]:
        """The tenant's files, oldest first; ids of those that have gone are let go."""
        key = self._table.key("files", tenant)
        found: list[FileRecord] = []
        ids = await self._table.send("zrange", key, 0, -1)
        for start in range(0, len(ids), PAGE):
            some = ids[start : start + PAGE]
            async with self._table.pipeline() as pipe:
                for one in some:
                    pipe.hgetall(self._table.key("file", one))
                rows = await pipe.execute()
            if gone := [one for one, row in zip(some, rows, strict=True) if not row]:
                await self._table.send("zrem", key, *gone)
            found += [FileRecord.from_hash(one, row) for one, row in zip(some, rows, strict=True) if row]
        return found


class Upload:
    """A file that is being written, in memory a piece at most; it exists once `finish` returns."""

    def __init__(self, table: AsyncTable, files: FileStore, tenant: str) -> None:
        self._table = table
        self._files = files
        self._tenant = tenant
        self._id = f"file-{secrets.token_hex(12)}"
        self._buffer = bytearray()
        self._pieces = 0
        self.bytes = 0

    async def add(self, data: bytes) -> None:
        """Write on.

        Raises:
            BodyTooLarge: the file passes 200 MB.
            InvalidRequest: it is no UTF-8.
            QuotaExceeded: with it the tenant would keep more than it may.
        """
        self.bytes += len(data)
        if self.bytes > MAX_FILE_BYTES:
            raise BodyTooLarge(f"the file is larger than {MAX_FILE_BYTES:,} bytes", field="file")
        self._buffer += data
        while len(self._buffer) > PIECE_BYTES:  # so that the byte that comes next is there
            await self._put(_whole_characters(self._buffer, PIECE_BYTES))

    async def finish(self, name: str, purpose: str, ttl_s: int | None) -> FileRecord:
        """Write the rest, and the row that makes it a file. Raises like `add`, and InvalidRequest for an empty file."""
        if self._buffer:
            await self._put(len(self._buffer))
        if not self._pieces:
            raise InvalidRequest("the file is empty", field="file")
        created, *expires = await self._table.run(
            "file_add", self._id, self._tenant, 1000 * (ttl_s or self._files.ttl_s), self._pieces,
            *piece_names(self._id, self._pieces), "purpose", purpose, "name", name, "bytes", self.bytes,
        )  # fmt: skip
        if not expires:
            raise StorageUnavailable("the upload took so long that its beginning is no longer there")
        return FileRecord(
            self._id, self._tenant, purpose, name, self.bytes, self._pieces, created / 1000, expires[0] / 1000
        )

    async def drop(self) -> None:
        """Remove what is written of a file that will not be."""
        if self._pieces:
            await self._table.run("piece_drop", self._id, self._tenant, *piece_names(self._id, self._pieces))

    async def _put(self, size: int) -> None:
        await self._files.memory.admit()
        text = bytes(self._buffer[:size])
        try:
            text.decode()
        except UnicodeDecodeError as error:
            at = self.bytes - len(self._buffer) + error.start
            raise InvalidRequest(f"the file is not UTF-8: see byte {at:,}", field="file") from None
        most, name = self._files.max_kept_bytes, piece_name(self._id, self._pieces + 1)
        kind, *used = await self._files.pieces.put(name, self._tenant, text, most)
        if kind == "quota":
            raise QuotaExceeded(
                f"{used[0]:,} bytes of yours are kept, and files may bring them to {most:,}: delete files or jobs",
                details={"limit": most, "used": used[0]},
            )
        self._pieces += 1
        del self._buffer[:size]


def _whole_characters(text: bytearray, size: int) -> int:
    """The most bytes, up to `size`, after which a character begins; of what is no UTF-8, `size`."""
    return next((end for end in range(size, size - 4, -1) if text[end] & 0xC0 != 0x80), size)
