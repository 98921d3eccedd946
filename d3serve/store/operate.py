"""What an operator does with the job table: see what each tenant has in it, and take out what one has."""

from dataclasses import dataclass
from typing import NamedTuple

from d3serve.settings import Settings
from d3serve.store.batches import KINDS, BatchRecord
from d3serve.store.census import LANES
from d3serve.store.connect import RedisClient, open_sync, storage_errors
from d3serve.store.files import FileRecord
from d3serve.store.pieces import piece_names
from d3serve.store.table import Table

AT_ONCE = 500


@dataclass(frozen=True)
class TenantUse:
    """What one tenant has in the job table: jobs of any status, those of them that wait, and bytes kept for all."""

    tenant: str
    jobs: int
    waiting_jobs: int
    waiting_tokens: int
    kept_bytes: int


class Erased(NamedTuple):
    """What was taken out."""

    jobs: int
    batches: int
    files: int


class Operator:
    """Works on Redis directly, past keys and quotas; raises StorageUnavailable."""

    def __init__(self, client: RedisClient, namespace: str) -> None:
        self._table = Table(client, namespace)
        self._key = self._table.key

    @classmethod
    def open(cls, settings: Settings) -> "Operator":
        """Connect to `settings.redis_url`."""
        return cls(open_sync(settings), settings.namespace)

    def tenants(self) -> list[TenantUse]:
        """Every tenant that has jobs or files, the one that keeps the most first."""
        uses = [self._use(tenant) for tenant in self._names()]
        return sorted(uses, key=lambda use: (-use.kept_bytes, use.tenant))

    def purge(self, tenant: str) -> Erased:
        """Cancel and erase all batches, files and jobs of a tenant, those that come meanwhile included."""
        batches = self._purge_batches(tenant)  # first: they make jobs, and hold files
        files = self._purge_files(tenant)
        erased = 0
        while ids := self._table.send("zrange", self._key("jobs", tenant), 0, AT_ONCE - 1):
            erased += sum(self._erase(job_id, tenant) for job_id in ids)
        return Erased(erased, batches, files)

    def _purge_batches(self, tenant: str) -> int:
        erased = 0
        while ids := self._table.send("zrange", self._key("batches", tenant), 0, AT_ONCE - 1):
            for batch_id in ids:
                row = self._table.send("hgetall", self._key("batch", batch_id))
                batch = BatchRecord.from_hash(batch_id, row) if row else None
                written = (
                    [(batch.pieces_of[kind], batch.tails[kind].piece) for kind in KINDS] if batch else []
                )
                pieces = [name for file_id, count in written for name in piece_names(file_id, count)]
                erased += self._table.run("batch_drop", batch_id, tenant, *pieces)
        return erased

    def _purge_files(self, tenant: str) -> int:
        erased = 0
        while ids := self._table.send("zrange", self._key("files", tenant), 0, AT_ONCE - 1):
            for file_id in ids:
                row = self._table.send("hgetall", self._key("file", file_id))
                pieces = piece_names(file_id, FileRecord.from_hash(file_id, row).pieces) if row else []
                erased += max(0, self._table.run("file_drop", file_id, tenant, *pieces))
                self._table.send("zrem", self._key("files", tenant), file_id)
        return erased

    def _erase(self, job_id: str, tenant: str) -> bool:
        self._table.run("cancel", job_id, tenant)
        answer = self._table.run("delete", job_id, tenant)
        # Of one that had gone only its name was left.
        self._table.send("zrem", self._key("jobs", tenant), job_id)
        return bool(answer[0] == 1)

    def _names(self) -> list[str]:
        names = set()
        for listed in (self._key("jobs"), self._key("files")):
            with storage_errors():
                found = self._table.client.scan_iter(match=listed + "*", count=1_000)
                names |= {str(name).removeprefix(listed) for name in found}
        return list(names)

    def _use(self, tenant: str) -> TenantUse:
        with self._table.pipeline() as pipe:
            pipe.zcard(self._key("jobs", tenant))
            pipe.hget(self._key("kept"), tenant)
            for lane in LANES:
                pipe.zcard(self._key("line", f"{lane}:{tenant}"))
                pipe.hget(self._key("waiting", lane), tenant)
            jobs, kept, *lanes = pipe.execute()
        tokens = sum(int(count or 0) for count in lanes[1::2])
        return TenantUse(tenant, jobs, sum(lanes[::2]), tokens, int(kept or 0))
