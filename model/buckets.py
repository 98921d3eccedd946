"""Bucket: the sizes that a small pass is padded to, so that one CUDA graph serves all passes of about its size."""

from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from d3serve.kernels.attention_plan import Sizes as AttentionSizes
from d3serve.kernels.recurrence_plan import CHUNK, TILE, RecurrenceSizes, recurrence_sizes
from d3serve.model.plan import PassRows

# Rows that passes are padded to: a matrix product of 250 rows takes as long as one of 256, and a pass of more
# than 1024 rows keeps the device busy for longer than the host takes to launch it.
ROW_SIZES = (*range(32, 256, 32), *range(256, 1025, 64))
MAX_PARTIALS = 512  # a graph keeps room for them: 256 MB at 24 heads of 256


class Bucket(NamedTuple):
    """Rows, segments that can start at once, segments that wait for a state of the same pass, attention's partials."""

    rows: int
    roots: int
    followers: int
    partials: int

    @classmethod
    def of(cls, rows: PassRows, partials: int) -> Self | None:
        """Return the smallest bucket that holds a pass; None for a pass that is too large to gain by one."""
        at = bisect_left(ROW_SIZES, len(rows.tokens))
        if at == len(ROW_SIZES) or partials > MAX_PARTIALS:
            return None
        sizes = recurrence_sizes(rows.segments)
        return cls(ROW_SIZES[at], *map(_power_of_two, (sizes.roots, sizes.followers, partials)))

    @property
    def segments(self) -> int:
        """Segments of both kinds."""
        return self.roots + self.followers

    @property
    def attention(self) -> AttentionSizes:
        """What a padded plan of the full-attention layers has room for."""
        return AttentionSizes(self.rows, self.segments, self.partials)

    @property
    def recurrence(self) -> RecurrenceSizes:
        """Entries of the linear layers' tables: every segment may end in a part of a tile and of a chunk."""
        return RecurrenceSizes(
            tiles=self.rows // TILE + self.segments,
            chunks=self.rows // CHUNK + self.segments,
            roots=self.roots,
            followers=self.followers,
        )

    def pad(self, rows: PassRows) -> PassRows:
        """Fill a pass up with rows that store nothing and with readout rows whose result nobody takes.

        `state_rows` becomes 0, so the last layer treats state rows like the others: a captured graph cannot
        cut where each pass's states end.
        """
        extra = self.rows - len(rows.tokens)
        return replace(
            rows,
            tokens=_padded(rows.tokens, extra, 0),
            positions=_padded(rows.positions, extra, 0),
            slot_mapping=_padded(rows.slot_mapping, extra, -1),
            readout_rows=_padded(rows.readout_rows, self.segments - len(rows.readout_rows), 0),
            state_rows=0,
        )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0


def _padded(values: NDArray[np.int64], extra: int, fill: int) -> NDArray[np.int64]:
    return np.concatenate((values, np.full(extra, fill, dtype=np.int64)))
