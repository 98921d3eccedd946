"""What an operator does with the job table: see what each tenant has in it, and take out what one has."""

from dataclasses import dataclass

from d3serve.settings import Settings
from d3serve.store.census import LANES
from d3serve.store.connect import RedisClient, open_sync, storage_errors
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
        """Every tenant that has jobs, the one that keeps the most first."""
        uses = [self._use(tenant) for tenant in self._names()]
        return sorted(uses, key=lambda use: (-use.kept_bytes, use.tenant))

    def purge(self, tenant: str) -> int:
        """Cancel and erase all jobs of a tenant, those that come meanwhile included; how many there were."""
        erased = 0
        while ids := self._table.send("zrange", self._key("jobs", tenant), 0, AT_ONCE - 1):
            erased += sum(self._erase(job_id, tenant) for job_id in ids)
        return erased

    def _erase(self, job_id: str, tenant: str) -> bool:
        self._table.run("cancel", job_id, tenant)
        answer = self._table.run("delete", job_id, tenant)
        # Of one that had gone only its name was left.
        self._table.send("zrem", self._key("jobs", tenant), job_id)
        return bool(answer[0] == 1)

    def _names(self) -> list[str]:
        listed = self._key("jobs")
        with storage_errors():
            found = self._table.client.scan_iter(match=listed + "*", count=1_000)
            return [str(name).removeprefix(listed) for name in found]

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
