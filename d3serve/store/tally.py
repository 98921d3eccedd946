"""What every process counts in one place, for /metrics: attempts, reaped leases, and how long things took.

A worker sends its jobs' times once a turn, when it frees the lease: a commit, which somebody waits for, counts nothing.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

# 1, 2.5 and 5 of each power of ten, then minutes and hours up to three days, the longest that a webhook is tried.
BOUNDS_MS: Final = (
    1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000, 300_000, 900_000,
    3_600_000, 14_400_000, 86_400_000, 259_200_000,
)  # fmt: skip


@dataclass(frozen=True)
class Times:
    """How long something took: how often, by the least of `BOUNDS_MS` that it did not exceed; and the sum."""

    by_bound: tuple[int, ...] = (0,) * (len(BOUNDS_MS) + 1)
    sum_s: float = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has it: by each bound in seconds, how many did not exceed it."""
        found, so_far = list[tuple[str, float]](), 0
        for bound, count in zip((*BOUNDS_MS, None), self.by_bound, strict=True):
            so_far += count
            found.append(("+Inf" if bound is None else str(bound / 1000), so_far))
        return found


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
        """Read the hash `tally`: `<kind>:<label>` and `<what>:<label>:<bound in ms, inf, or us for the sum>`."""
        counts = defaultdict[str, dict[str, int]](dict)
        by_bound = defaultdict[tuple[str, str], list[int]](lambda: list(Times().by_bound))
        sums_s = dict[tuple[str, str], float]()
        for name, value in row.items():
            match name.split(":"):
                case [what, label, "us"]:
                    sums_s[what, label] = int(value) / 1e6
                case [what, label, bound]:
                    by_bound[what, label][bisect_left(BOUNDS_MS, float(bound))] += int(value)
                case [kind, label]:
                    counts[kind][label] = int(value)
        times = defaultdict[str, dict[str, Times]](dict)
        for (what, label), found in by_bound.items():
            times[what][label] = Times(tuple(found), sums_s.get((what, label), 0.0))
        return cls(counts, times, webhooks_pending, webhooks_late_s)


def observe(spent: Counter[str], lane: str, spent_ms: Mapping[str, float | None]) -> None:
    """Note where a job's time went, in fields of the hash `tally`; None: nobody knows. A clock may be set back."""
    for what, ms in spent_ms.items():
        if ms is not None:
            took = max(0.0, ms)
            bound = (*BOUNDS_MS, "inf")[bisect_left(BOUNDS_MS, took)]
            spent[f"{what}:{lane}:{bound}"] += 1
            spent[f"{what}:{lane}:us"] += round(took * 1000)


def lua_prelude() -> str:
    """Lua that defines the bounds, for scripts that note times themselves."""
    return f"local BOUNDS_MS = {{ {', '.join(map(str, BOUNDS_MS))} }}\n"
