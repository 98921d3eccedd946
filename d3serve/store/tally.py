"""What every process counts in one place, for /metrics: attempts, reaped leases, and how long things took."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

LAST_POWER: Final = 28  # 2^28 ms are three days, the longest that a webhook is tried; `observe` in ends.lua


@dataclass
class Times:
    """How long something took: how often it was 2^n ms or less and more than the half, by n; and the sum."""

    by_power: Counter[int] = field(default_factory=Counter)
    sum_s: float = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has it: by each bound in seconds, how many did not exceed it."""
        found, so_far = list[tuple[str, float]](), 0
        for power in range(LAST_POWER + 1):
            so_far += self.by_power[power]
            found.append((str(2**power / 1000), so_far))
        return [*found, ("+Inf", self.by_power.total())]


@dataclass(frozen=True)
class Counted:
    """`counts` by kind and label; `times` by what took them and label.

    `webhooks_late_s` is for how long the webhook event that is due first has been due.
    """

    counts: Mapping[str, Mapping[str, int]]
    times: Mapping[str, Mapping[str, Times]]
    webhooks_pending: int
    webhooks_late_s: float

    @classmethod
    def of(cls, row: Mapping[str, str], webhooks_pending: int, webhooks_late_s: float) -> Self:
        """Read the hash `tally`: `<kind>:<label>` and `<what>:<label>:<power, or us for the sum>`."""
        counts = defaultdict[str, dict[str, int]](dict)
        times = defaultdict[str, defaultdict[str, Times]](lambda: defaultdict(Times))
        for name, value in row.items():
            match name.split(":"):
                case [what, label, "us"]:
                    times[what][label].sum_s = int(value) / 1e6
                case [what, label, power]:
                    times[what][label].by_power[int(power)] = int(value)
                case [kind, label]:
                    counts[kind][label] = int(value)
        return cls(counts, times, webhooks_pending, webhooks_late_s)
