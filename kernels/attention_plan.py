"""Which query rows meet which keys: the work lists of one attention pass, made on the host, uploaded once.

The words. A **tile** is a run of query rows that share a prefix, small enough that its rows times the query
heads of one key/value head fit BLOCK_M. A tile reads two key ranges: `open`, which every row sees whole, then
`edge`, in which each row sees `row_ranges[row]` only. So one kernel serves all segments: an `edge` range is
the own block of a question, the diagonal of a causal block, or the own blocks of several short questions that
share a tile. An **item** is a piece of a tile's keys, a **program** a list of items, and a **merge** joins
the pieces of one tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from d3serve.kernels.attention_tiles import TileShape
from d3serve.kernels.segments import Segment

ITEM_FIELDS = (
    8  # query row, rows, open begin, open end, edge begin, edge end, partial slot (-1: none), unused
)
MERGE_FIELDS = 4  # query row, rows, first partial slot, pieces
SECTION_ALIGN = 32  # int32s: every list starts on a 128-byte line, so Triton specialises its pointer once
ITEM_OVERHEAD_BLOCKS = (
    6  # starting an item and storing its result: 10 us on an H200, a block of 64 keys 1.8 us
)
MERGE_BLOCKS = 4  # launching the merge and reading the pieces back, by the same clock
SPLIT_GAIN = 0.95  # a fixed share of work waits for the slowest processor: less gain than this is none
MIN_PIECE_BLOCKS = 4  # a border nearer to a tile's end than this moves to the end


class Launch(NamedTuple):
    """All that a launch depends on besides the contents of its tensors; hashable.

    A CUDA graph captured with a plan replays every plan of an equal launch: copy the new plan's `table` into
    the captured one's. So a graph cache must have `launch` in its key.
    """

    tile: TileShape
    rows: int
    programs: int
    items: int
    merges: int
    partials: int


class DenseBlock(NamedTuple):
    """A long both-ways block without a prefix: a library's dense attention is faster than any tile loop."""

    start: int
    length: int
    own_start: int


@dataclass(frozen=True)
class AttentionPlan:
    """Work lists of one pass, for every layer of it. `dense` blocks are not in the lists."""

    launch: Launch
    kv_heads: int
    rows: int  # that q must have at least
    pool_rows: int
    dense: tuple[DenseBlock, ...]
    table: Tensor  # int32, holds the four lists below
    row_ranges: Tensor  # [rows, 2]: first and past-the-last own pool row that a query row sees
    program_starts: Tensor  # [programs + 1]: the items of each program
    items: Tensor  # [items, ITEM_FIELDS]
    merges: Tensor  # [merges, MERGE_FIELDS]


class _Tiles(NamedTuple):
    """Columns of equal length, one entry a tile."""

    row: np.ndarray
    rows: np.ndarray
    open_begin: np.ndarray
    open_end: np.ndarray
    edge_begin: np.ndarray
    edge_end: np.ndarray

    def blocks(self, block_n: int) -> tuple[np.ndarray, np.ndarray]:
        """Key blocks of the open and of the edge range."""
        return _ceil_div(self.open_end - self.open_begin, block_n), _ceil_div(
            self.edge_end - self.edge_begin, block_n
        )


class _Pieces(NamedTuple):
    """Columns of equal length: blocks `[first, last)` of a tile, done by a program. In order of (tile, first)."""

    tile: np.ndarray
    first: np.ndarray
    last: np.ndarray
    program: np.ndarray


def plan_tiles(
    segments: Sequence[Segment],
    *,
    causal: bool,
    group: int,
    kv_heads: int,
    tile: TileShape,
    slots: int,
    device: torch.device,
    sizes: tuple[int, int] | None = None,
) -> AttentionPlan:
    """The work lists of `segments` for one tile shape, on `device`.

    Args:
        segments: in order of their rows, which do not overlap; empty ones are skipped.
        causal: whether a row sees its own block only up to itself.
        group: query heads a key/value head.
        kv_heads: HK; every head follows the same lists.
        tile: see `TileShape`.
        slots: programs a key/value head that run at once; tiles are split over keys until they are used.
        device: where the lists go, in one copy.
        sizes: pad every list to what so many (rows, segments) can need: `launch` then depends on them alone.

    Raises:
        ValueError: segments overlap or are out of order, a field is negative, or `sizes` are too small.
    """
    if group > tile.block_m:
        raise ValueError(f"a group of {group} query heads does not fit a tile of {tile.block_m}")
    spans = _spans(segments)
    rows = int((spans[:, 0] + spans[:, 1]).max(initial=0))
    row_ranges = _row_ranges(spans, rows, causal)
    tiles = _tiles(spans, row_ranges, tile.block_m // group, tile.block_n)
    pieces = _schedule(sum(tiles.blocks(tile.block_n)), slots)
    program_starts, items, merges, partials = _lists(tiles, pieces, tile.block_n)
    launch = Launch(tile, rows, len(program_starts) - 1, len(items), len(merges), partials)
    if sizes is not None:
        if rows > sizes[0] or len(spans) > sizes[1]:
            raise ValueError(f"{rows} rows in {len(spans)} segments exceed the padded sizes {sizes}")
        launch = _capacity(tile, group, slots, *sizes)
    table, views = _upload((row_ranges, program_starts, items, merges), launch, device)
    own_end, prefix_end = (
        (spans[:, begin] + spans[:, length]).max(initial=0) for begin, length in ((2, 1), (3, 4))
    )
    return AttentionPlan(launch, kv_heads, launch.rows, int(max(own_end, prefix_end)), (), table, *views)


def _spans(segments: Sequence[Segment]) -> np.ndarray:
    """[N, 5] start, length, own_start, prefix_start, prefix_length of the segments that have rows."""
    spans = np.array([segment[:5] for segment in segments], dtype=np.int64).reshape(-1, 5)
    if (spans < 0).any():
        raise ValueError(f"a segment has a negative field: {segments[int((spans < 0).any(axis=1).argmax())]}")
    spans = spans[spans[:, 1] > 0]
    overlap = spans[1:, 0] < spans[:-1, 0] + spans[:-1, 1]
    if overlap.any():
        at = int(overlap.argmax())
        raise ValueError(
            f"segments must stand in order of their rows: {spans[at]} is followed by {spans[at + 1]}"
        )
    if spans.size and spans.max(initial=0) + spans[:, 1].max() >= 2**31:
        raise ValueError("a pool of 2^31 rows or more cannot be addressed")
    return spans


def _ceil_div(a: np.ndarray, b: int) -> np.ndarray:
    return -(-a // b)


def _steps(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(owner, index within owner) of each element when owner i has `lengths[i]` of them."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _row_ranges(spans: np.ndarray, rows: int, causal: bool) -> np.ndarray:
    owner, index = _steps(spans[:, 1])
    ranges = np.zeros((rows, 2), dtype=np.int64)
    at, begin = spans[owner, 0] + index, spans[owner, 2]
    ranges[at, 0] = begin
    ranges[at, 1] = begin + (index + 1 if causal else spans[owner, 1])
    return ranges


def _tiles(spans: np.ndarray, row_ranges: np.ndarray, rows_a_tile: int, block_n: int) -> _Tiles:
    """Cut the segments into tiles, or runs of consecutive segments where that takes fewer blocks.

    A run has consecutive rows, one prefix and consecutive own pool rows, so the own blocks of its segments
    make one `edge` range.
    """
    follows = (
        (spans[1:, 0] == spans[:-1, 0] + spans[:-1, 1])
        & (spans[1:, 2] == spans[:-1, 2] + spans[:-1, 1])
        & (spans[1:, 4] == spans[:-1, 4])
        & ((spans[1:, 3] == spans[:-1, 3]) | (spans[1:, 4] == 0))
    )
    first = np.concatenate((np.ones(min(len(spans), 1), dtype=bool), ~follows))
    run = np.cumsum(first) - 1
    runs = spans[first]
    runs[:, 1] = np.bincount(run, weights=spans[:, 1], minlength=len(runs)).astype(np.int64)

    apart, run_apart = _cut_evenly(spans, run, row_ranges, rows_a_tile)
    joint, run_joint = _cut_evenly(runs, np.arange(len(runs)), row_ranges, rows_a_tile)
    cost_apart, cost_joint = (
        np.bincount(of, weights=sum(tiles.blocks(block_n)) + ITEM_OVERHEAD_BLOCKS, minlength=len(runs))
        for tiles, of in ((apart, run_apart), (joint, run_joint))
    )
    join = cost_joint < cost_apart
    kept = [
        np.concatenate((a[~join[run_apart]], b[join[run_joint]])) for a, b in zip(apart, joint, strict=True)
    ]
    order = np.argsort(kept[0], kind="stable")
    return _Tiles(*(column[order] for column in kept))


def _cut_evenly(
    spans: np.ndarray, run: np.ndarray, row_ranges: np.ndarray, rows_a_tile: int
) -> tuple[_Tiles, np.ndarray]:
    """Tiles of nearly equal height over each span, and the run of each tile."""
    counts = _ceil_div(spans[:, 1], rows_a_tile)
    owner, index = _steps(counts)
    start, length, _, prefix_start, prefix_length = spans[owner].T
    row = start + index * length // counts[owner]
    end = start + (index + 1) * length // counts[owner]
    begin_first, end_first = row_ranges[row].T
    begin_last, end_last = row_ranges[end - 1].T
    # Ranges move forward only, so the first row and the last decide what all rows of a tile see.
    common = np.where(begin_first == begin_last, end_first, begin_first)
    has_prefix = prefix_length > 0
    open_begin = np.where(has_prefix, prefix_start, begin_first)
    open_end = np.where(has_prefix, prefix_start + prefix_length, common)
    edge_begin = np.where(has_prefix, begin_first, common)
    return _Tiles(row, end - row, open_begin, open_end, edge_begin, end_last), run[owner]


def _schedule(blocks: np.ndarray, slots: int) -> _Pieces:
    """Share the tiles' key blocks out to programs, of which `slots` run at a time: whole tiles or split ones."""
    whole = _one_program_a_tile(blocks)
    if len(blocks) == 0:
        return whole
    waves = -(-len(blocks) // slots) * (blocks.max() + ITEM_OVERHEAD_BLOCKS)
    even = (blocks.sum() + ITEM_OVERHEAD_BLOCKS * len(blocks)) / slots + blocks.max() + ITEM_OVERHEAD_BLOCKS
    split = _split(blocks, slots)
    work = np.bincount(split.program, weights=split.last - split.first + ITEM_OVERHEAD_BLOCKS)
    return split if work.max() + MERGE_BLOCKS < SPLIT_GAIN * min(waves, even) else whole


def _one_program_a_tile(blocks: np.ndarray) -> _Pieces:
    """The longest first, equal ones in their order: the device starts a program whenever one ends."""
    tile = np.arange(len(blocks))
    program = np.argsort(-blocks, kind="stable").argsort()
    return _Pieces(tile, np.zeros_like(tile), blocks, program)


def _split(blocks: np.ndarray, slots: int) -> _Pieces:
    """At most `slots` programs of nearly equal work.

    Each tile gives whole chunks of its keys, one program a chunk; what remains of all tiles is laid end to end
    and cut evenly for the programs left over. Equal chunks of different tiles start at the same key, so
    programs that run together read the same keys from the L2 cache.
    """
    chunk = max(-(-int(blocks.sum()) // slots), 2 * MIN_PIECE_BLOCKS)
    full = blocks // chunk
    rest = blocks - full * chunk
    last_full = full * chunk + np.where((full > 0) & (rest < MIN_PIECE_BLOCKS), rest, 0)
    owner, index = _steps(full)
    chunk_end = np.where(index + 1 == full[owner], last_full[owner], (index + 1) * chunk)
    chunk_program = np.lexsort((owner, index)).argsort()

    of, first, last, program = _fill(blocks - last_full, max(slots - len(owner), 1))
    tiles = np.concatenate((owner, of))
    firsts = np.concatenate((index * chunk, last_full[of] + first))
    lasts = np.concatenate((chunk_end, last_full[of] + last))
    programs = np.concatenate((chunk_program, len(owner) + program))
    order = np.lexsort((firsts, tiles))
    return _Pieces(tiles[order], firsts[order], lasts[order], programs[order])


def _fill(rest: np.ndarray, programs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay `rest` blocks of all tiles end to end and cut them for `programs`: (tile, first, last, program)."""
    ends = np.cumsum(rest)
    total = int(ends[-1])
    borders = np.arange(1, programs) * total // programs if total else np.zeros(0, dtype=np.int64)
    at = np.searchsorted(ends, borders, side="right")
    low, high = ends[at] - rest[at], ends[at]
    near_low, near_high = borders - low < MIN_PIECE_BLOCKS, high - borders < MIN_PIECE_BLOCKS
    to_low = near_low & (~near_high | (borders - low <= high - borders))
    borders = np.where(to_low, low, np.where(near_high, high, borders))
    borders = np.unique(borders[(borders > 0) & (borders < total)])
    edges = np.union1d(ends[rest > 0], borders)
    begins = np.concatenate(([0], edges[:-1]))[: len(edges)]
    of = np.searchsorted(ends, begins, side="right")
    base = ends[of] - rest[of]
    return of, begins - base, edges - base, np.searchsorted(borders, begins, side="right")


def _lists(tiles: _Tiles, pieces: _Pieces, block_n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(program_starts, items, merges, number of partial slots) as the kernels read them."""
    open_blocks, _ = tiles.blocks(block_n)
    count = np.bincount(pieces.tile, minlength=len(tiles.row))
    split = count > 1
    is_partial = split[pieces.tile]
    slot = np.where(is_partial, np.cumsum(is_partial) - 1, -1)
    t = pieces.tile
    in_edge_first = np.maximum(pieces.first - open_blocks[t], 0)
    in_edge_last = np.maximum(pieces.last - open_blocks[t], 0)
    items = np.stack(
        (
            tiles.row[t],
            tiles.rows[t],
            np.minimum(tiles.open_begin[t] + pieces.first * block_n, tiles.open_end[t]),
            np.minimum(tiles.open_begin[t] + pieces.last * block_n, tiles.open_end[t]),
            np.minimum(tiles.edge_begin[t] + in_edge_first * block_n, tiles.edge_end[t]),
            np.minimum(tiles.edge_begin[t] + in_edge_last * block_n, tiles.edge_end[t]),
            slot,
            np.zeros_like(t),
        ),
        axis=1,
    )
    order = np.argsort(pieces.program, kind="stable")
    programs = int(pieces.program.max(initial=-1)) + 1
    program_starts = np.searchsorted(pieces.program[order], np.arange(programs + 1))
    first_slot = (np.cumsum(np.where(split, count, 0)) - count)[split]
    merges = np.stack((tiles.row[split], tiles.rows[split], first_slot, count[split]), axis=1)
    return program_starts, items[order], merges, int(is_partial.sum())


def _capacity(tile: TileShape, group: int, slots: int, max_rows: int, max_segments: int) -> Launch:
    """Sizes that any plan of so many rows and segments fits: `_split` makes fewer cuts than slots."""
    tiles = max_rows // (tile.block_m // group) + max_segments
    return Launch(tile, max_rows, max(tiles, slots), tiles + slots, slots, 2 * slots)


def _upload(
    lists: tuple[np.ndarray, ...], launch: Launch, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """One int32 tensor of all lists, and its views, padded to `launch`: empty programs and merges, unseeing rows."""
    shapes = (
        (launch.rows, 2),
        (launch.programs + 1,),
        (launch.items, ITEM_FIELDS),
        (launch.merges, MERGE_FIELDS),
    )
    counts = [int(np.prod(shape)) for shape in shapes]
    offsets = np.cumsum([0, *(-(-count // SECTION_ALIGN) * SECTION_ALIGN for count in counts)])
    host = torch.zeros(int(offsets[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for values, offset in zip(lists, offsets, strict=False):
        flat[offset : offset + values.size] = values.ravel()
    starts = lists[1]
    flat[offsets[1] + starts.size : offsets[1] + counts[1]] = starts[-1]
    table = host.to(device, non_blocking=True)
    sections = zip(offsets, counts, shapes, strict=False)
    return table, [table[offset : offset + count].view(shape) for offset, count, shape in sections]
