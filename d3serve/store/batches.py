"""Batches: what the API makes and shows, and what a feeder claims and moves on (docs/adr/0013)."""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Self

from d3serve.errors import IdempotencyKeyReused, InvalidRequest, NotFound, QuotaExceeded, StorageUnavailable
from d3serve.settings import Settings
from d3serve.store.connect import AsyncRedisClient
from d3serve.store.files import FileStore
from d3serve.store.pieces import piece_name, piece_names
from d3serve.store.records import JobRecord
from d3serve.store.states import LARGE_BYTES
from d3serve.store.table import Argument, AsyncStore

WINDOW_S: Final = 86_400
MARGIN_S: Final = 3_600  # for what is left of an input when its batch has expired: each line is told of
AGAIN_S: Final = 600  # a client that asks again does so within minutes
MAX_OPEN: Final = 100  # batches of a tenant that have not ended
BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
OutputKind = Literal["output", "error"]
KINDS: Final[tuple[OutputKind, ...]] = ("output", "error")
COUNTS: Final = ("completed", "failed", "input_tokens", "cached_tokens")


class Cursor(NamedTuple):
    """How far the input has been read: the next line, by its number, and where it begins."""

    line: int = 1
    piece: int = 1
    character: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote."""
        return cls(*map(int, text.split()))

    def __str__(self) -> str:
        return " ".join(map(str, self))


class Tail(NamedTuple):
    """The end of an output file that is being written: its last piece's number and length."""

    piece: int
    bytes: int


@dataclass(frozen=True)
class BatchTerms:
    """A batch to be made; `output_ttl_s` is how long its output is kept, None: as long as any file."""

    input_file: str
    endpoint: str
    metadata: dict[str, str] | None
    output_ttl_s: int | None


@dataclass(frozen=True)
class BatchRecord:
    """One batch as the table holds it; `times` has the moments of its statuses, in seconds since the epoch.

    `ending` is why it ends early, if it does; `input_read` says that every line has become a job or an outcome.
    """

    id: str
    tenant: str
    status: BatchStatus
    endpoint: str
    input_file: str
    created_at: float
    expires_at: float
    metadata: dict[str, str] | None
    counts: Mapping[str, int]
    times: Mapping[str, float]
    errors: list[dict[str, Any]]
    files: Mapping[OutputKind, str]
    output_ttl_s: int | None
    total: int
    cursor: Cursor
    input_read: bool
    ending: str
    tails: Mapping[OutputKind, Tail]
    fence: int

    @classmethod
    def from_hash(cls, batch_id: str, row: Mapping[str, str]) -> Self:
        """The record of the hash `batch:<id>`."""
        return cls(
            id=batch_id,
            tenant=row["tenant"],
            status=row["status"],  # type: ignore[arg-type] # only our scripts write it
            endpoint=row["endpoint"],
            input_file=row["input"],
            created_at=int(row["created"]) / 1000,
            expires_at=int(row["expires"]) / 1000,
            metadata=json.loads(row["metadata"]),
            counts={name: int(row.get(name, 0)) for name in COUNTS},
            times={name: int(value) / 1000 for name, value in row.items() if name.endswith("_at")},
            errors=json.loads(row.get("errors", "[]")),
            files={kind: row[f"{kind}_file"] for kind in KINDS if f"{kind}_file" in row},
            output_ttl_s=int(row["output_ttl_s"]) if "output_ttl_s" in row else None,
            total=int(row.get("total", 0)),
            cursor=Cursor.parse(row.get("cursor", "1 1 0")),
            input_read="input_read" in row,
            ending=row.get("ending", ""),
            tails={
                kind: Tail(int(row.get(f"{kind}_pieces", 0)), int(row.get(f"{kind}_tail", 0)))
                for kind in KINDS
            },
            fence=int(row["fence"]),
        )

    @property
    def terms(self) -> BatchTerms:
        """What it was made of."""
        return BatchTerms(self.input_file, self.endpoint, self.metadata, self.output_ttl_s)

    @property
    def pieces_of(self) -> Mapping[OutputKind, str]:
        """The ids under which its output files are written."""
        return {kind: f"file-{self.id.removeprefix('batch_')}-{kind}" for kind in KINDS}


@dataclass
class BatchStep:
    """What a feeder has achieved; all of it is written at once, or nothing."""

    fields: dict[str, Argument] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)
    fed: list[tuple[int, str, str]] = field(default_factory=list)  # line, '<job id> <bytes>', label
    done: list[int] = field(default_factory=list)
    texts: dict[OutputKind, list[bytes]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    text_bytes: int = 0

    def add(self, name: str, more: int) -> None:
        """Count."""
        self.sums[name] = self.sums.get(name, 0) + more

    def write(self, kind: OutputKind, text: bytes) -> None:
        """Add to an output file."""
        self.texts[kind].append(text)
        self.text_bytes += len(text)

    @property
    def moved(self) -> int:
        """How many lines it took in or brought out."""
        return max(len(self.fed), self.sums.get("completed", 0) + self.sums.get("failed", 0))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.fields or self.sums or self.fed or self.done)


class Ended(NamedTuple):
    """How a batch ends."""

    status: BatchStatus
    errors: tuple[dict[str, Any], ...] = ()


def _refusal(most_bytes: int, kind: str, *told: Any) -> NotFound | InvalidRequest | QuotaExceeded:
    """The error for what BATCH_ADD answered."""
    if kind == "unknown":
        return NotFound("no such file, or no longer", field="input_file_id")
    if kind == "purpose":
        return InvalidRequest(f"the file's purpose is {told[0]}; it must be batch", field="input_file_id")
    if kind == "short":
        return InvalidRequest(
            "the file is kept for less than the 25 hours that a batch may need it: upload it again, for longer",
            field="input_file_id",
        )
    if kind == "quota":
        return QuotaExceeded(
            f"{told[0]:,} bytes of yours are kept, and with this batch they would be more than {most_bytes:,}: "
            "delete files or jobs",
            details={"limit": most_bytes, "used": told[0]},
        )
    details = {"limit": MAX_OPEN, "used": told[0]}
    return QuotaExceeded(f"{told[0]} of your batches have not ended; {MAX_OPEN} may", details=details)


class BatchStore(AsyncStore):
    """Raises StorageUnavailable when Redis is unreachable or full; a tenant sees only what is its own."""

    def __init__(self, client: AsyncRedisClient, settings: Settings) -> None:
        super().__init__(client, settings)
        self.files = FileStore(self._table, settings)
        self._max_bytes = settings.max_kept_bytes_per_tenant

    # --- for clients -------------------------------------------------------------------------------

    async def create(
        self, tenant: str, terms: BatchTerms, *, key: str | None = None, again: bool = False
    ) -> BatchRecord:
        """Make a batch of a file; with `key`, or where the caller says that it asks `again`, one for all such calls.

        Raises:
            NotFound: the tenant has no such file.
            InvalidRequest: the file is no input, or runs out before the batch may end.
            IdempotencyKeyReused: the key came before, for another batch.
            QuotaExceeded: the tenant has as many open batches, files or bytes as it may.
        """
        if again and key is None and (found := await self._alike(tenant, terms)):
            return found
        await self.files.memory.admit()
        await self.files.check_count(tenant)  # a batch leaves two
        name = hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest() if key else secrets.token_hex(12)
        batch_id = f"batch_{name[:24]}"
        kept = ("output_ttl_s", terms.output_ttl_s) if terms.output_ttl_s else ()
        kind, *told = await self._table.run(
            "batch_add", batch_id, tenant, terms.input_file, 1000 * WINDOW_S, 1000 * MARGIN_S, MAX_OPEN,
            self._max_bytes, "endpoint", terms.endpoint, "metadata", json.dumps(terms.metadata), *kept,
        )  # fmt: skip
        if kind != "new":
            raise _refusal(self._max_bytes, kind, *told)
        batch = await self.get(batch_id, tenant)
        if batch.terms != terms:
            raise IdempotencyKeyReused(f"this Idempotency-Key came before, for {batch_id}, with another body")
        return batch

    async def _alike(self, tenant: str, terms: BatchTerms) -> BatchRecord | None:
        """What the same call made a moment ago."""
        newest, _ = await self.page(tenant, after=None, limit=MAX_OPEN)
        since = await self.now_s() - AGAIN_S
        return next((one for one in newest if one.terms == terms and one.created_at >= since), None)

    async def get(self, batch_id: str, tenant: str) -> BatchRecord:
        """Read a batch.

        Raises:
            NotFound: the tenant has none of this id, or no longer.
        """
        row = await self._table.send("hgetall", self._key("batch", batch_id))
        if not row or row["tenant"] != tenant:
            raise NotFound("no such batch, or no longer", field="batch_id")
        return BatchRecord.from_hash(batch_id, row)

    async def page(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """Batches, newest first, after the one of the id `after`, and whether there are more.

        Raises:
            NotFound: there is no batch `after`.
        """
        key = self._key("batches", tenant)
        start = 0
        if after is not None:
            place = await self._table.send("zrevrank", key, after)
            if place is None:
                raise NotFound("no such batch, or no longer", field="after")
            start = place + 1
        ids = await self._table.send("zrevrange", key, start, start + limit)
        async with self._table.pipeline() as pipe:
            for one in ids:
                pipe.hgetall(self._key("batch", one))
            rows = await pipe.execute()
        if gone := [one for one, row in zip(ids, rows, strict=True) if not row]:
            await self._table.send("zrem", key, *gone)
        found = [BatchRecord.from_hash(one, row) for one, row in zip(ids[:limit], rows, strict=False) if row]
        return found, len(ids) > limit

    async def cancel(self, batch_id: str, tenant: str) -> BatchRecord:
        """Ask for a batch's end; one that is over stays as it is. Raises like `get`."""
        await self._table.run("batch_cancel", batch_id, tenant)
        return await self.get(batch_id, tenant)

    # --- for feeders -------------------------------------------------------------------------------

    async def claim(self, lease_s: float) -> BatchRecord | None:
        """Take the batch that is due, for `lease_s` at most."""
        found = await self._table.run("batch_claim", round(1000 * lease_s))
        if not found:
            return None
        batch_id, fence = found
        row = await self._table.send("hgetall", self._key("batch", batch_id))
        return BatchRecord.from_hash(batch_id, row | {"fence": str(fence)}) if "tenant" in row else None

    async def in_flight(self, batch: BatchRecord) -> dict[int, tuple[str, int]]:
        """Its lines that are jobs now: the job's id, and how long the line is, in bytes."""
        row = await self._table.send("hgetall", self._key("flight", batch.id))
        return {int(line): (job, int(size)) for line, (job, size) in ((n, v.split()) for n, v in row.items())}

    async def labels(self, batch: BatchRecord, lines: list[int]) -> list[str]:
        """What was kept with lines that are in flight."""
        return list(await self._table.send("hmget", self._key("labels", batch.id), *lines)) if lines else []

    async def statuses(self, job_ids: list[str]) -> list[str | None]:
        """The statuses of jobs; None for one that has gone."""
        async with self._table.pipeline() as pipe:
            for job_id in job_ids:
                pipe.hget(self._key("job", job_id), "status")
            return list(await pipe.execute())

    async def jobs(self, job_ids: list[str]) -> list[JobRecord | None]:
        """The jobs, with their results; None for one that has gone."""
        async with self._table.pipeline() as pipe:
            for job_id in job_ids:
                pipe.hgetall(self._key("job", job_id)).get(self._key("res", job_id))
            told = await pipe.execute()
        pairs = zip(job_ids, told[::2], told[1::2], strict=True)
        return [JobRecord.from_hash(job_id, row, result) if row else None for job_id, row, result in pairs]

    async def erase_jobs(self, batch: BatchRecord, job_ids: list[str]) -> None:
        """Erase jobs whose answers are in a file; those that run or have gone stay as they are."""
        await self._table.run_each("delete", [(job_id, batch.tenant) for job_id in job_ids])

    async def step(
        self, batch: BatchRecord, step: BatchStep, delay_s: float, ended: Ended | None = None
    ) -> bool:
        """Write what was achieved and give the batch back, due again after `delay_s`; False if another claimed it."""
        tails = {kind: _tail_after(batch.tails[kind]) for kind in KINDS}
        texts: list[tuple[Argument, ...]] = [
            (kind, piece_name(batch.pieces_of[kind], tails[kind]), tails[kind], b"".join(step.texts[kind]))
            for kind in KINDS
            if step.texts[kind]
        ]
        fields, files = dict(step.fields), []
        if ended is not None:
            fields |= await self._last_fields(ended)
            last = {kind: tails[kind] if step.texts[kind] else batch.tails[kind].piece for kind in KINDS}
            files = [self._file(batch, kind, last[kind]) for kind in KINDS if last[kind]]
        done = [(line,) for line in step.done]
        rows: Sequence[Sequence[tuple[Argument, ...]]] = (
            list(fields.items()), list(step.sums.items()), step.fed, done, texts, files,
        )  # fmt: skip
        flat = [part for row in rows for part in (len(row), *(value for values in row for value in values))]
        name, delay_ms = secrets.token_hex(8), round(1000 * delay_s)
        if not await self._table.run("batch_step", batch.id, batch.fence, name, delay_ms, *flat):
            return False
        if ended is None:
            await self._move_full(batch, [kind for kind in KINDS if step.texts[kind]])
        return True

    async def _last_fields(self, ended: Ended) -> dict[str, Argument]:
        at_ms = await self._table.now_us() // 1000
        fields: dict[str, Argument] = {"status": ended.status, "ended": 1, f"{ended.status}_at": at_ms}
        if ended.status in ("completed", "expired"):
            fields["finalizing_at"] = at_ms
        if ended.errors:
            fields["errors"] = json.dumps(ended.errors)
        return fields

    async def _move_full(self, batch: BatchRecord, kinds: list[OutputKind]) -> None:
        """Move pieces that grow no more: those that were full before this step wrote to their files."""
        for kind in kinds:
            if _is_full(batch.tails[kind]):
                name = piece_name(batch.pieces_of[kind], batch.tails[kind].piece)
                with suppress(StorageUnavailable, NotFound):  # a full disk: it stays where it is
                    await self.files.pieces.move(name, batch.id, batch.fence)

    def _file(self, batch: BatchRecord, kind: OutputKind, pieces: int) -> tuple[Argument, ...]:
        file_id, ttl_s = batch.pieces_of[kind], batch.output_ttl_s or self.files.ttl_s
        return (
            kind,
            file_id,
            1000 * ttl_s,
            f"{batch.id}_{kind}.jsonl",
            pieces,
            *piece_names(file_id, pieces),
        )


def _is_full(tail: Tail) -> bool:
    return tail.piece > 0 and tail.bytes >= LARGE_BYTES


def _tail_after(tail: Tail) -> int:
    """The number of the piece that the next text goes to."""
    return tail.piece + 1 if tail.piece == 0 or _is_full(tail) else tail.piece
