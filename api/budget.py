"""How many bytes of request bodies one process holds at once, in all and for one caller."""

import threading
from collections import Counter
from typing import Final, Self

from d3serve.errors import Overloaded, RateLimited
from d3serve.settings import Settings

# A body costs three to four times its length while it is read and checked: so many bytes stay under 512 MiB.
LEAST_BYTES: Final = 128 * 2**20
BODIES_AT_ONCE: Final = (
    8  # of the largest size: one may be there encoded and decoded, and so may its neighbours
)
CALLERS_AT_LEAST: Final = 2  # one caller holds half at most, so that no one locks out the others


class BodyBudget:
    """Counts bytes in and out; used by the event loop and by the threads that decode."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self.share_bytes: Final = total_bytes // CALLERS_AT_LEAST
        self._held = 0
        self._held_by: Counter[str] = Counter()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Room for a few bodies of the largest size that the settings allow."""
        return cls(max(LEAST_BYTES, BODIES_AT_ONCE * settings.max_body_bytes))

    @property
    def held_bytes(self) -> int:
        """What is held now."""
        return self._held

    def take(self, caller: str, size: int) -> None:
        """Count `size` bytes in.

        Raises:
            Overloaded: the process holds as much as it may.
            RateLimited: the caller does.
        """
        with self._lock:
            if self._held_by[caller] + size > self.share_bytes:
                raise RateLimited(
                    f"bodies of this caller's requests under way come to more than {self.share_bytes:,} bytes"
                )
            if self._held + size > self._total:
                raise Overloaded(
                    f"bodies of requests under way come to more than {self._total:,} bytes; ask again"
                )
            self._held += size
            self._held_by[caller] += size

    def give_back(self, caller: str, size: int) -> None:
        """Count `size` bytes out."""
        with self._lock:
            self._held -= size
            self._held_by[caller] -= size
            if not self._held_by[caller]:
                del self._held_by[caller]


class BodyBytes:
    """The bytes of one request's body, counted as they come to be and given back when the request has ended."""

    def __init__(self, budget: BodyBudget, caller: str) -> None:
        self._budget = budget
        self._caller = caller
        self._size = 0

    def take(self, size: int) -> None:
        """Count in what is about to be kept; raises like `BodyBudget.take`."""
        self._budget.take(self._caller, size)
        self._size += size

    def give_back(self) -> None:
        """Count all of it out."""
        self._budget.give_back(self._caller, self._size)
        self._size = 0
