"""What both tiers of the state cache are made of: contiguous ranges of a pool, and the place of one state."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Entry:
    """One state's place on the device: pool rows `[start, start + length)` and one slot.

    `delta` is what is added to a token's index behind the state to give its position: 0 without media.
    """

    key: str
    start: int
    length: int
    slot: int
    delta: int = 0
    pins: int = 1
    turn: int = 0  # in which it was used last
    credit: int = 0  # what it is worth: tokens to read again, on top of the cache's age when it was last used


class RangeAllocator:
    """Hands out contiguous ranges of `size` units: the lowest gap that fits, or the highest for short-lived ones.

    What a unit is, is its owner's matter: a row of the K/V pools, or a byte of host memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._used: list[tuple[int, int]] = []  # (start, end), sorted

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Free ranges (start, end), lowest first."""
        start = 0
        for used_start, used_end in self._used:
            if used_start > start:
                yield start, used_start
            start = used_end
        if start < self.size:
            yield start, self.size

    def allocate(self, length: int, *, high: bool = False) -> int | None:
        """Return the start of a range now in use, or None if no gap is long enough."""
        fitting = [gap for gap in self.gaps() if gap[1] - gap[0] >= length]
        if not fitting:
            return None
        start = fitting[-1][1] - length if high else fitting[0][0]
        self._used.append((start, start + length))
        self._used.sort()
        return start

    def free(self, start: int, length: int) -> None:
        """Give a range back."""
        self._used.remove((start, start + length))
