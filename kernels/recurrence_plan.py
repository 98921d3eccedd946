"""RecurrencePlan: a pass's segments as the integer tables that the linear layers' kernels walk.

The tables are built once per pass and read by every linear layer. A segment that starts from a slot which
another segment of the same pass fills is a *follower*: it runs after its *root*. Everything is int32 and
can be padded to fixed sizes with empty entries, so that one captured CUDA graph serves many passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from d3serve.kernels.segments import Segment

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
    roots, followers, parents = _phases(segments)
    tiles = [row for segment in segments for row in _tiles(segment, parents.get(segment.initial_slot))]
    chunks = [(start, rows) for s in (*roots, *followers) for start, rows in _cut(s.start, s.length, CHUNK)]
    steps, pieces = _steps(roots, followers, step_chunks if sizes is None else max(1, len(chunks)))
    if sizes is not None:
        steps, pieces = _pad(tiles, chunks, steps, pieces, sizes)
    flat = [number for rows in (tiles, chunks, pieces) for row in rows for number in row]
    table = torch.tensor(flat, dtype=torch.int32)
    if torch.device(device).type == "cuda":
        table = table.pin_memory()
    table = table.to(device, non_blocking=True)
    tile_end = len(tiles) * TILE_COLUMNS
    chunk_end = tile_end + len(chunks) * CHUNK_COLUMNS
    return RecurrencePlan(
        table=table,
        tiles=table[:tile_end].view(-1, TILE_COLUMNS),
        chunks=table[tile_end:chunk_end].view(-1, CHUNK_COLUMNS),
        pieces=table[chunk_end:].view(-1, PIECE_COLUMNS),
        steps=tuple(steps),
    )


def recurrence_sizes(segments: Sequence[Segment]) -> RecurrenceSizes:
    """Count the table entries that a pass needs, without building them.

    Raises:
        ValueError: as `plan_recurrence`.
    """
    roots, followers, _ = _phases(segments)
    return RecurrenceSizes(
        tiles=sum(-(-s.length // TILE) for s in segments),
        chunks=sum(-(-s.length // CHUNK) for s in segments),
        roots=len(roots),
        followers=len(followers),
    )


def _phases(segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment], dict[int, Segment]]:
    """Split the segments into those that can run at once and those that wait for a slot of this pass."""
    parents: dict[int, Segment] = {}
    for segment in segments:
        if segment.length < 1:
            raise ValueError(
                f"a segment needs at least one row, got length {segment.length} at row {segment.start}"
            )
        if segment.final_slot == NOWHERE:
            continue
        if segment.final_slot in parents:
            raise ValueError(f"two segments fill slot {segment.final_slot}")
        if segment.final_slot == segment.initial_slot:
            raise ValueError(f"a segment both reads and fills slot {segment.final_slot}")
        parents[segment.final_slot] = segment
    roots = [s for s in segments if s.initial_slot not in parents]
    followers = [s for s in segments if s.initial_slot in parents]
    for segment in followers:
        parent = parents[segment.initial_slot]
        if parent.initial_slot in parents:
            raise ValueError(
                f"slot {segment.initial_slot} is filled by a segment that itself waits for another"
            )
    return roots, followers, parents


def _cut(start: int, length: int, size: int) -> list[tuple[int, int]]:
    """(first row, rows) of the runs of `size` rows that cover `[start, start + length)`."""
    return [(start + done, min(size, length - done)) for done in range(0, length, size)]


def _tiles(segment: Segment, parent: Segment | None) -> list[tuple[int, ...]]:
    """List the convolution tiles of one segment; a follower's first tile looks back into its root."""
    runs = _cut(segment.start, segment.length, TILE)
    if parent is None:
        previous_row, previous_rows, slot = segment.start, 0, segment.initial_slot
    else:
        previous_row = parent.start + parent.length
        previous_rows, slot = min(parent.length, TILE), parent.initial_slot
    rows = []
    for row, count in runs:
        is_last = row + count == segment.start + segment.length
        final_slot = segment.final_slot if is_last else NOWHERE
        rows.append((row, count, previous_row, previous_rows, slot, final_slot))
        previous_row, previous_rows, slot = row + count, TILE, NOWHERE
    return rows


def _steps(
    roots: list[Segment], followers: list[Segment], step_chunks: int
) -> tuple[list[Step], list[tuple[int, ...]]]:
    """Deal the chunks, roots first, into steps of at most `step_chunks`; a step's end may cut a segment."""
    steps: list[Step] = []
    pieces: list[tuple[int, ...]] = []
    counts = [0, 0]  # pieces of each phase in the step under way
    used = first_chunk = 0

    def close() -> None:
        nonlocal used, first_chunk, counts
        start = len(pieces) - sum(counts)
        steps.append(Step(first_chunk, used, ((start, counts[0]), (start + counts[0], counts[1]))))
        first_chunk, used, counts = first_chunk + used, 0, [0, 0]

    for phase, group in enumerate((roots, followers)):
        for segment in group:
            row, left, initial = segment.start, segment.length, segment.initial_slot
            while left:
                if used == step_chunks:
                    close()
                rows = min(left, (step_chunks - used) * CHUNK)
                carry = NOWHERE - 1 - len(steps) % 2  # two in turn: one is read while the other is written
                final = segment.final_slot if rows == left else carry
                pieces.append((row, rows, used, initial, final))
                counts[phase] += 1
                used += -(-rows // CHUNK)
                row, left, initial = row + rows, left - rows, carry
    close()
    return steps, pieces


def _pad(
    tiles: list[tuple[int, ...]],
    chunks: list[tuple[int, ...]],
    steps: list[Step],
    pieces: list[tuple[int, ...]],
    sizes: RecurrenceSizes,
) -> tuple[list[Step], list[tuple[int, ...]]]:
    """Fill the tables of a one-step pass up to `sizes` with entries that do and store nothing."""
    (_, roots), (_, followers) = steps[0].phases
    needed = RecurrenceSizes(len(tiles), len(chunks), roots, followers)
    for name, need, have in zip(RecurrenceSizes._fields, needed, sizes, strict=True):
        if need > have:
            raise ValueError(f"the pass needs {need} {name}, the bucket holds {have}")
    tiles += [_EMPTY_TILE] * (sizes.tiles - len(tiles))
    chunks += [_EMPTY_CHUNK] * (sizes.chunks - len(chunks))
    padded = [
        *pieces[:roots],
        *[_EMPTY_PIECE] * (sizes.roots - roots),
        *pieces[roots:],
        *[_EMPTY_PIECE] * (sizes.followers - followers),
    ]
    return [Step(0, sizes.chunks, ((0, sizes.roots), (sizes.roots, sizes.followers)))], padded
