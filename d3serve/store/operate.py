"""What an operator does with the job table: see what each tenant has in it, and take out what one has."""

from collections.abc import Iterator
from dataclasses import dataclass

from d3serve.settings import Settings
from d3serve.store.census import LANES
from d3serve.store.connect import Client, open_sync, storage_errors
from d3serve.store.keys import Keys
from d3serve.store.lua import run_script

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

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._key = Keys(namespace)

    @classmethod
    def open(cls, settings: Settings) -> "Operator":
        """Connect to `settings.redis_url`."""
        return cls(open_sync(settings), settings.namespace)

    def tenants(self) -> list[TenantUse]:
        """Every tenant that has jobs, the one that keeps the most first."""
        with storage_errors():
            uses = [self._use(tenant) for tenant in self._names()]
        return sorted(uses, key=lambda use: (-use.kept_bytes, use.tenant))

    def purge(self, tenant: str) -> int:
        """Cancel and erase all jobs of a tenant, those that come meanwhile included; how many there were."""
        erased = 0
        with storage_errors():
            while ids := self._client.zrange(self._key("jobs", tenant), 0, AT_ONCE - 1):
                erased += sum(self._erase(job_id, tenant) for job_id in ids)
        return erased

    def _erase(self, job_id: str, tenant: str) -> bool:
        run_script(self._client, "cancel", self._key.prefix, job_id, tenant)
        answer = run_script(self._client, "delete", self._key.prefix, job_id, tenant)
        self._client.zrem(self._key("jobs", tenant), job_id)  # of one that had gone only its name was left
        return bool(answer[0] == 1)

    def _names(self) -> Iterator[str]:
        listed = self._key("jobs")
        for name in self._client.scan_iter(match=listed + "*", count=1_000):
            yield str(name).removeprefix(listed)

    def _use(self, tenant: str) -> TenantUse:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.zcard(self._key("jobs", tenant))
            pipe.hget(self._key("kept"), tenant)
            for lane in LANES:
                pipe.zcard(self._key("line", f"{lane}:{tenant}"))
                pipe.hget(self._key("waiting", lane), tenant)
            jobs, kept, *lanes = pipe.execute()
        tokens = sum(int(count or 0) for count in lanes[1::2])
        return TenantUse(tenant, jobs, sum(lanes[::2]), tokens, int(kept or 0))
