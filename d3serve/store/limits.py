"""How much may wait and be kept, in all and of one tenant, and how a submission beyond that is refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from d3serve.errors import QueueFull, QuotaExceeded
from d3serve.settings import Settings
from d3serve.store.census import Census

QUEUED_BYTES = 2**30  # half of what the embedded broker has: results need the rest
SOONEST_S, LATEST_S = 5.0, 60.0  # sooner than that, whoever else was refused has taken the room
UNKNOWN_S = 10.0


@dataclass(frozen=True)
class Limits:
    """What SUBMIT compares with, and the errors for its refusals."""

    settings: Settings
    census: Census

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """The limits as SUBMIT takes them."""
        chosen = self.settings
        return (
            chosen.max_queued_jobs,
            self.queued_bytes,
            chosen.max_queued_jobs_per_tenant,
            chosen.max_kept_bytes_per_tenant,
        )

    @property
    def queued_bytes(self) -> int:
        """The bytes of states and questions that may wait: one tenant's share must fit."""
        return max(QUEUED_BYTES, self.settings.max_kept_bytes_per_tenant)

    async def refusal(self, tenant: str, kind: str, *told: Any) -> QueueFull | QuotaExceeded:
        """The error for what SUBMIT answered: of the whole queue, or of the tenant's own share."""
        if kind == "full":
            after_s = await self._room_after_s(None)
            return QueueFull(
                f"{told[0]} jobs wait already",
                details={"retry_after_s": after_s, "queued_jobs": int(told[0])},
            )
        return await self._quota_exceeded(tenant, told)

    async def _quota_exceeded(self, tenant: str, told: Sequence[Any]) -> QuotaExceeded:
        used = int(told[1])
        if told[0] == "jobs":
            limit, after_s = self.settings.max_queued_jobs_per_tenant, await self._room_after_s(tenant)
            text = f"{used:,} of your jobs wait already; {limit:,} may"
        else:
            limit, after_s = self.settings.max_kept_bytes_per_tenant, LATEST_S
            text = (
                f"{used:,} bytes of your jobs are kept and this one would go beyond {limit:,}: "
                "delete jobs, or wait until results expire"
            )
        details = {"limit": limit, "used": used, "retry_after_s": round(after_s)}
        return QuotaExceeded(text, details=details)

    async def _room_after_s(self, tenant: str | None) -> float:
        """When there may be room: after a tenth of what waits, of one tenant or of all."""
        tokens = await self.census.waiting_tokens(tenant)
        speed = await self.census.tokens_per_s()
        return round(min(LATEST_S, max(SOONEST_S, tokens / speed / 10 if speed else UNKNOWN_S)))
