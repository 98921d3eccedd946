"""RecurrencePlan: a pass's segments as the integer tables that the linear layers' kernels walk.

The tables are built once per pass and read by every linear layer. A segment that starts from a slot which
another segment of the same pass fills is a *follower*: it runs after its *root*. Everything is int32 and
can be padded to fixed sizes with empty entries, so that one captured CUDA graph serves many passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from d3serve.kernels.segments import Segment
from d3serve.kernels.tables import upload

CHUNK = 64  # rows of a gated-delta-rule chunk: a restart inside a segment at multiples of it changes nothing
TILE = 16  # rows of a convolution tile; the kernel's history reaches no further back than one tile
STEP_CHUNKS = 256  # chunks whose intermediates live at once: 0.5 GB on the 27B's 48 value heads

TILE_COLUMNS = 6  # row, rows, previous_row, previous_rows, slot, final_slot
CHUNK_COLUMNS = 2  # row, rows
PIECE_COLUMNS = 5  # row, rows, first chunk inside the step, initial, final

NOWHERE = -1  # a slot number: zeros to start from, nothing to write
_EMPTY_TILE = (0, 0, 0, 0, NOWHERE, NOWHERE)
_EMPTY_CHUNK = (0, 0)
_EMPTY_PIECE = (0, 0, 0, NOWHERE, NOWHERE)


class RecurrenceSizes(NamedTuple):
    """How many entries each table of a pass holds: the key of a CUDA graph bucket."""

    tiles: int
    chunks: int
    roots: int
    followers: int


class Step(NamedTuple):
    """One round of launches: chunks `[first_chunk, first_chunk + chunks)`, then its pieces, phase by phase.

    A piece is a segment, or the part of one that falls into this step. `phases` holds (first piece, pieces)
    of the roots and of the followers.
    """

    first_chunk: int
    chunks: int
    phases: tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class RecurrencePlan:
    """Device tables of one pass (int32, [n, columns], contiguous views of `table`) and its launches.

    tiles: row, rows, previous_row, previous_rows, slot, final_slot. The row before `row` is row
    `previous_row - 1`, and so on for `previous_rows` rows; older ones are columns of conv slot `slot`.
    chunks: row, rows. pieces: row, rows, first chunk inside its step, initial, final; a slot number, -1 for
    none, or `-2 - i` for carry i, which hands a segment's state from one step to the next.
    """

    table: torch.Tensor
    tiles: torch.Tensor
    chunks: torch.Tensor
    pieces: torch.Tensor
    steps: tuple[Step, ...]


def plan_recurrence(
    segments: Sequence[Segment],
    *,
    device: torch.device | str,
    sizes: RecurrenceSizes | None = None,
    step_chunks: int = STEP_CHUNKS,
) -> RecurrencePlan:
    """Lay the pass's linear-layer work out, with one copy to `device`.

    Args:
        segments: the pass's segments in any order.
        device: where the tables go.
        sizes: pad every table to these sizes; the pass must then fit one step.
        step_chunks: most chunks whose intermediates live at once; a longer pass takes several steps.

    Raises:
        ValueError: an empty segment, a slot filled twice or read and filled by one segment, a follower of a
            follower, or a pass that does not fit `sizes`.
    """
    rows = _Rows.of(segments)
    needed = rows.sizes
    steps, pieces = _steps(rows, step_chunks if sizes is None else max(1, needed.chunks))
    if sizes is not None:
        steps, pieces = _pad(pieces, needed, sizes)
    held = needed if sizes is None else sizes
    tile_end = held.tiles * TILE_COLUMNS
    chunk_end = tile_end + held.chunks * CHUNK_COLUMNS
    flat = np.empty(chunk_end + len(pieces) * PIECE_COLUMNS, dtype=np.int32)
    _write_tiles(flat[:tile_end].reshape(-1, TILE_COLUMNS), rows)
    _write_chunks(flat[tile_end:chunk_end].reshape(-1, CHUNK_COLUMNS), rows)
    flat[chunk_end:].reshape(-1, PIECE_COLUMNS)[:] = pieces
    _, (table,) = upload((flat,), torch.int32, device)
    return RecurrencePlan(
        table=table,
        tiles=table[:tile_end].view(-1, TILE_COLUMNS),
        chunks=table[tile_end:chunk_end].view(-1, CHUNK_COLUMNS),
        pieces=table[chunk_end:].view(-1, PIECE_COLUMNS),
        steps=steps,
    )


def recurrence_sizes(segments: Sequence[Segment]) -> RecurrenceSizes:
    """Count the table entries that a pass needs, without building or checking them."""
    filled = {segment.final_slot for segment in segments} - {NOWHERE}
    followers = sum(segment.initial_slot in filled for segment in segments)
    return RecurrenceSizes(
        tiles=sum(-(-segment.length // TILE) for segment in segments),
        chunks=sum(-(-segment.length // CHUNK) for segment in segments),
        roots=len(segments) - followers,
        followers=followers,
    )


Numbers = NDArray[np.int64]


class _Rows(NamedTuple):
    """The segments as columns, and which of them can run at once and which wait for a slot of this pass."""

    start: Numbers
    length: Numbers
    initial: Numbers
    final: Numbers
    parent: Numbers  # the segment that fills a follower's slot; -1: none does
    order: Numbers  # the roots, then the followers
    roots: int

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Self:
        columns = np.array(
            [(s.start, s.length, s.initial_slot, s.final_slot) for s in segments], dtype=np.int64
        )
        start, length, initial, final = columns.reshape(-1, 4).T
        fills = {slot: at for at, slot in enumerate(final.tolist()) if slot != NOWHERE}
        parent = np.array([fills.get(slot, -1) for slot in initial.tolist()], dtype=np.int64)
        order = np.argsort(parent >= 0, kind="stable")
        rows = cls(start, length, initial, final, parent, order, int((parent < 0).sum()))
        rows._check(len(fills))
        return rows

    @property
    def sizes(self) -> RecurrenceSizes:
        tiles, chunks = (int((-(-self.length // size)).sum()) for size in (TILE, CHUNK))
        return RecurrenceSizes(tiles, chunks, self.roots, len(self.order) - self.roots)

    def _check(self, filled: int) -> None:
        fills = self.final != NOWHERE
        if (self.length < 1).any():
            at = int(np.argmin(self.length))
            raise ValueError(
                f"a segment needs at least one row, got length {self.length[at]} at row {self.start[at]}"
            )
        if fills.sum() > filled:
            slots, counts = np.unique(self.final[fills], return_counts=True)
            raise ValueError(f"two segments fill slot {slots[counts > 1][0]}")
        if (both := fills & (self.final == self.initial)).any():
            raise ValueError(f"a segment both reads and fills slot {self.final[both][0]}")
        followers = self.order[self.roots :]
        if (waits := self.parent[self.parent[followers]] >= 0).any():
            slot = self.initial[followers][waits][0]
            raise ValueError(f"slot {slot} is filled by a segment that itself waits for another")


def _cut(lengths: Numbers, size: int) -> tuple[Numbers, Numbers, Numbers]:
    """Runs of `size` rows that cover each length: which length, the run's first row inside it, its rows."""
    counts = -(-lengths // size)
    segment = np.repeat(np.arange(len(lengths)), counts)
    inside = (np.arange(len(segment)) - (np.cumsum(counts) - counts)[segment]) * size
    return segment, inside, np.minimum(size, lengths[segment] - inside)


def _write_tiles(table: NDArray[np.int32], rows: _Rows) -> None:
    """List the convolution tiles of the segments; a follower's first tile looks back into its root."""
    segment, inside, count = _cut(rows.length, TILE)
    row, at = rows.start[segment] + inside, slice(len(segment))
    table[len(segment) :] = _EMPTY_TILE
    table[at, 0], table[at, 1], table[at, 2], table[at, 3], table[at, 4] = row, count, row, TILE, NOWHERE
    table[at, 5] = np.where(inside + count == rows.length[segment], rows.final[segment], NOWHERE)
    first = np.flatnonzero(inside == 0)  # of each segment
    table[first, 3], table[first, 4] = 0, rows.initial
    if len(followers := rows.order[rows.roots :]):
        first, root = first[followers], rows.parent[followers]
        table[first, 2] = rows.start[root] + rows.length[root]
        table[first, 3] = np.minimum(rows.length[root], TILE)
        table[first, 4] = rows.initial[root]


def _write_chunks(table: NDArray[np.int32], rows: _Rows) -> None:
    """List the chunks, those of roots first."""
    segment, inside, count = _cut(rows.length[rows.order], CHUNK)
    table[len(segment) :] = _EMPTY_CHUNK
    table[: len(segment), 0] = rows.start[rows.order][segment] + inside
    table[: len(segment), 1] = count


def _steps(rows: _Rows, step_chunks: int) -> tuple[tuple[Step, ...], Numbers]:
    """Deal the chunks, roots first, into steps of `step_chunks`; a step's end may cut a segment into pieces."""
    order, length = rows.order, rows.length[rows.order]
    chunks = -(-length // CHUNK)
    end = np.cumsum(chunks)
    begin, total = end - chunks, int(chunks.sum())
    counts = (end - 1) // step_chunks - begin // step_chunks + 1
    of = np.repeat(np.arange(len(order)), counts)
    nth = np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
    step = begin[of] // step_chunks + nth
    first, last = np.maximum(begin[of], step * step_chunks), np.minimum(end[of], (step + 1) * step_chunks)
    done = (first - begin[of]) * CHUNK
    carry = NOWHERE - 1 - step % 2  # two in turn: one is read while the other is written
    pieces = np.empty((len(of), PIECE_COLUMNS), dtype=np.int64)
    pieces[:, 0] = rows.start[order][of] + done
    pieces[:, 1] = np.minimum(length[of] - done, (last - first) * CHUNK)
    pieces[:, 2] = first - step * step_chunks
    pieces[:, 3] = np.where(nth == 0, rows.initial[order][of], NOWHERE - 1 - (step - 1) % 2)
    pieces[:, 4] = np.where(last == end[of], rows.final[order][of], carry)
    number = max(1, -(-total // step_chunks))
    phases = np.bincount(2 * step + (of >= rows.roots), minlength=2 * number).tolist()
    steps, at = [], 0
    for each in range(number):
        roots, followers = phases[2 * each : 2 * each + 2]
        used = min(step_chunks, total - each * step_chunks)
        steps.append(Step(each * step_chunks, used, ((at, roots), (at + roots, followers))))
        at += roots + followers
    return tuple(steps), pieces


def _pad(
    pieces: Numbers, needed: RecurrenceSizes, sizes: RecurrenceSizes
) -> tuple[tuple[Step, ...], Numbers]:
    """Fill a one-step pass up to `sizes` with pieces that do and store nothing."""
    for name, need, have in zip(RecurrenceSizes._fields, needed, sizes, strict=True):
        if need > have:
            raise ValueError(f"the pass needs {need} {name}, the bucket holds {have}")
    padded = np.empty((sizes.roots + sizes.followers, PIECE_COLUMNS), dtype=np.int64)
    padded[:] = _EMPTY_PIECE
    padded[: needed.roots] = pieces[: needed.roots]
    padded[sizes.roots : sizes.roots + needed.followers] = pieces[needed.roots :]
    return (Step(0, sizes.chunks, ((0, sizes.roots), (sizes.roots, sizes.followers))),), padded
