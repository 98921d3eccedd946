"""HostTier: states that left the device, kept in host memory until they are asked about again.

Copying a state back takes milliseconds where reading it again takes seconds. A state is in one place at a
time: on the device or here. All copies run on the stream that runs the passes, so a range or a row that is
given to another state is never overwritten before its copy has ended.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from d3serve.errors import InvalidSettings
from d3serve.model.backbone import Pools
from d3serve.model.ranges import Entry, RangeAllocator

ALIGNMENT = 64  # bytes; a part may be viewed as any type


@dataclass(frozen=True)
class KeptState:
    """One state's place in host memory; `length` is its number of K/V rows, `delta` as in `Entry`."""

    key: str
    length: int
    start: int
    size: int
    delta: int = 0


class HostTier:
    """Keeps states that were evicted from `pools` in `max_bytes` of pinned memory, least recently kept out first."""

    def __init__(self, pools: Pools, max_bytes: int) -> None:
        """Take the memory at once: pinning it piece by piece would stall passes.

        Raises:
            InvalidSettings: the host does not give so much.
        """
        self._pools = pools
        try:
            self._memory = torch.empty(max_bytes, dtype=torch.uint8, pin_memory=pools.k.is_cuda)
        except RuntimeError as error:
            raise InvalidSettings(
                f"state_cache_host_bytes is {max_bytes}, which the host does not give: {str(error).splitlines()[0]}",
                field="state_cache_host_bytes",
            ) from error
        self._ranges = RangeAllocator(max_bytes)
        self._kept: OrderedDict[str, KeptState] = OrderedDict()

    def keys(self) -> list[str]:
        """Keys of the kept states, oldest first."""
        return list(self._kept)

    def holds(self, key: str) -> bool:
        """Whether a state is kept."""
        return key in self._kept

    def save(self, entry: Entry) -> None:
        """Copy a complete state out of the pools; one that is larger than the tier is let go."""
        parts = list(self._pools.parts(entry.start, entry.length, entry.slot))
        size = sum(map(_padded_size, parts))
        self.forget(entry.key)
        if size > self._ranges.size:
            return  # emptying the tier would not help
        while (start := self._ranges.allocate(size)) is None:
            if not self._kept:
                return
            self.forget(next(iter(self._kept)))
        kept = self._kept[entry.key] = KeptState(entry.key, entry.length, start, size, entry.delta)
        for part, host in zip(parts, self._views(kept, parts), strict=True):
            host.copy_(part, non_blocking=True)

    def take(self, key: str) -> KeptState | None:
        """Hand out a kept state, which no other eviction can push out from now on; `put_back` or `load` it."""
        return self._kept.pop(key, None)

    def put_back(self, kept: KeptState) -> None:
        """Keep a state on that was taken for nothing."""
        self._kept[kept.key] = kept

    def load(self, kept: KeptState, entry: Entry) -> None:
        """Copy a taken state into its new place in the pools and give its memory back."""
        parts = list(self._pools.parts(entry.start, entry.length, entry.slot))
        for part, host in zip(parts, self._views(kept, parts), strict=True):
            part.copy_(host, non_blocking=True)
        self._ranges.free(kept.start, kept.size)

    def forget(self, key: str) -> None:
        """Drop a state, if it is here."""
        if kept := self._kept.pop(key, None):
            self._ranges.free(kept.start, kept.size)

    def _views(self, kept: KeptState, parts: list[Tensor]) -> Iterator[Tensor]:
        """Yield host memory in the shapes of `parts`."""
        start = kept.start
        for part in parts:
            yield self._memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
            start += _padded_size(part)


def _padded_size(part: Tensor) -> int:
    return -(-part.nbytes // ALIGNMENT) * ALIGNMENT
