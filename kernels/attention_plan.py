"""Which query rows meet which keys: the work lists of one attention pass, made on the host, uploaded once.

The words. A **tile** is a run of query rows of one segment, small enough that its rows times the query heads of one
key/value head fit BLOCK_M. A tile reads two key ranges: `open`, which every row sees whole, then `edge`, in
which each row sees `row_ranges[row]` only. So one kernel serves all segments: an `edge` range is the own block of a
question or the diagonal of a causal block. An **item** is a tile over a piece of its keys, and a **merge** joins
the pieces of one tile.

How a segment is cut into tiles and pieces depends on that segment alone. So a row's sums are taken in one order,
and its result has the same bits, whatever else is in the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from d3serve.kernels.attention_tiles import TileShape
from d3serve.kernels.segments import Segment

ITEM_FIELDS = 8  # row, rows, open begin, open end, edge begin, edge end, partial slot (-1: none), unused
MERGE_FIELDS = 4  # row, rows, first partial slot, pieces
SECTION_ALIGN = 32  # int32s: every list starts on a 128-byte line, so Triton specialises its pointer once

# A question's keys are cut so that few questions on a long state still fill the device. A block of 64 keys takes an
# H200 1.8 us, starting an item and storing its result 10 us.
PIECE_BLOCKS = 64  # in a long range
SHORT_PIECE_BLOCKS = 32  # while there are at most SHORT_PIECES of them
SHORT_PIECES = 4
MAX_PIECES = 16
SPLIT_ROWS = 1024  # a longer segment fills the device with whole tiles
MAX_PARTIALS = 1024  # unmerged results at a time: 0.5 GB at 24 heads of 256; more are done in rounds


class Round(NamedTuple):
    """Items of a plan's lists that run together, and the merges that follow."""

    first_item: int
    items: int
    first_merge: int
    merges: int


class Launch(NamedTuple):
    """All that the launches depend on besides the contents of their tensors; hashable.

    A CUDA graph captured with a plan replays every plan of an equal launch: copy the new plan's `table` into
    the captured one's. So a graph cache must have `launch` in its key.
    """

    tile: TileShape
    rows: int
    partials: int  # most of a round
    rounds: tuple[Round, ...]

    @property
    def items(self) -> int:
        """Items of all rounds."""
        return sum(each.items for each in self.rounds)

    @property
    def merges(self) -> int:
        """Merges of all rounds."""
        return sum(each.merges for each in self.rounds)


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
    table: Tensor  # int32, holds the three lists below
    row_ranges: Tensor  # [rows, 2]: first and past-the-last own pool row that a query row sees
    items: Tensor  # [items, ITEM_FIELDS]
    merges: Tensor  # [merges, MERGE_FIELDS]


class Sizes(NamedTuple):
    """What a padded plan has room for."""

    rows: int
    segments: int
    partials: int


class _Tiles(NamedTuple):
    """Columns of equal length, one entry a tile."""

    row: np.ndarray
    rows: np.ndarray
    open_begin: np.ndarray
    open_end: np.ndarray
    edge_begin: np.ndarray
    edge_end: np.ndarray
    pieces: np.ndarray

    @property
    def unmerged(self) -> np.ndarray:
        """Partial slots of each tile: one a piece, none for a tile in one piece."""
        return np.where(self.pieces > 1, self.pieces, 0)

    @property
    def partials(self) -> int:
        """Partial slots of all tiles."""
        return int(self.unmerged.sum())

    def blocks(self, block_n: int) -> tuple[np.ndarray, np.ndarray]:
        """Key blocks of the open and of the edge range."""
        return _blocks(self.open_begin, self.open_end, block_n), _blocks(
            self.edge_begin, self.edge_end, block_n
        )


def plan_tiles(
    segments: Sequence[Segment],
    *,
    causal: bool,
    group: int,
    kv_heads: int,
    tile: TileShape,
    device: torch.device,
    sizes: Sizes | None = None,
    max_partials: int = MAX_PARTIALS,
) -> AttentionPlan:
    """The work lists of `segments` for one tile shape, on `device`.

    Args:
        segments: in order of their rows, which do not overlap; empty ones are skipped.
        causal: whether a row sees its own block only up to itself.
        group: query heads a key/value head.
        kv_heads: HK; every head follows the same lists.
        tile: see `TileShape`.
        device: where the lists go, in one copy.
        sizes: pad every list to what so much can need: `launch` then depends on them alone.
        max_partials: unmerged results that may wait for their merge at a time.

    Raises:
        ValueError: segments overlap or are out of order, a field is negative, or `sizes` are too small.
    """
    spans = _spans(segments)
    rows = int((spans[:, 0] + spans[:, 1]).max(initial=0))
    row_ranges = _row_ranges(spans, rows, causal)
    tiles = _tiles(spans, row_ranges, tile, group)
    partials = tiles.partials
    if sizes is not None:
        if rows > sizes.rows or len(spans) > sizes.segments or partials > sizes.partials:
            raise ValueError(f"{rows} rows in {len(spans)} segments with {partials} partials exceed {sizes}")
        max_partials = partials + MAX_PIECES + 1  # one round
    items, merges, rounds = _lists(tiles, tile.block_n, max_partials - MAX_PIECES)
    launch = Launch(tile, rows, min(partials, max_partials), rounds)
    if sizes is not None:
        launch = _capacity(tile, group, sizes)
    table, views = _upload((row_ranges, items, merges), launch, device)
    own_end, prefix_end = (
        (spans[:, begin] + spans[:, length]).max(initial=0) for begin, length in ((2, 1), (3, 4))
    )
    return AttentionPlan(launch, kv_heads, launch.rows, int(max(own_end, prefix_end)), (), table, *views)


def count_partials(segments: Sequence[Segment], *, causal: bool, group: int, tile: TileShape) -> int:
    """How many unmerged results a pass has: what `Sizes.partials` must hold.

    Raises:
        ValueError: as `plan_tiles`.
    """
    spans = _spans(segments)
    rows = int((spans[:, 0] + spans[:, 1]).max(initial=0))
    return _tiles(spans, _row_ranges(spans, rows, causal), tile, group).partials


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


def _blocks(begin: np.ndarray, end: np.ndarray, block_n: int) -> np.ndarray:
    return _ceil_div(end - begin, block_n)


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


def _tiles(spans: np.ndarray, row_ranges: np.ndarray, tile: TileShape, group: int) -> _Tiles:
    """Tiles of nearly equal height over each segment."""
    if group > tile.block_m:
        raise ValueError(f"a group of {group} query heads does not fit a tile of {tile.block_m}")
    counts = _ceil_div(spans[:, 1], tile.block_m // group)
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
    blocks = _blocks(open_begin, open_end, tile.block_n) + _blocks(edge_begin, end_last, tile.block_n)
    pieces = np.where(length > SPLIT_ROWS, 1, _pieces(blocks))
    return _Tiles(row, end - row, open_begin, open_end, edge_begin, end_last, pieces)


def _pieces(blocks: np.ndarray) -> np.ndarray:
    """Into how many pieces ranges of so many key blocks are cut."""
    short = np.minimum(_ceil_div(blocks, SHORT_PIECE_BLOCKS), SHORT_PIECES)
    return np.clip((blocks + PIECE_BLOCKS // 2) // PIECE_BLOCKS, short, MAX_PIECES)


def _lists(
    tiles: _Tiles, block_n: int, round_partials: int
) -> tuple[np.ndarray, np.ndarray, tuple[Round, ...]]:
    """(items, merges, rounds) as the kernels read them; a round's last tile may exceed `round_partials`."""
    open_blocks, edge_blocks = tiles.blocks(block_n)
    blocks, is_split = open_blocks + edge_blocks, tiles.pieces > 1
    round_of, first_slot = np.divmod(np.cumsum(tiles.unmerged) - tiles.unmerged, round_partials)
    t, index = _steps(tiles.pieces)
    first, last = index * blocks[t] // tiles.pieces[t], (index + 1) * blocks[t] // tiles.pieces[t]
    in_edge_first, in_edge_last = np.maximum(first - open_blocks[t], 0), np.maximum(last - open_blocks[t], 0)
    items = np.stack(
        (
            tiles.row[t],
            tiles.rows[t],
            np.minimum(tiles.open_begin[t] + first * block_n, tiles.open_end[t]),
            np.minimum(tiles.open_begin[t] + last * block_n, tiles.open_end[t]),
            np.minimum(tiles.edge_begin[t] + in_edge_first * block_n, tiles.edge_end[t]),
            np.minimum(tiles.edge_begin[t] + in_edge_last * block_n, tiles.edge_end[t]),
            np.where(is_split[t], first_slot[t] + index, -1),
            np.zeros_like(t),
        ),
        axis=1,
    )
    longest_first = np.lexsort((first - last, round_of[t]))  # the device starts an item whenever one ends
    merges = np.stack((tiles.row, tiles.rows, first_slot, tiles.pieces), axis=1)[is_split]
    rounds, item, merge = [], 0, 0
    for each in range(int(round_of.max(initial=-1)) + 1):
        rounds.append(
            Round(item, int((round_of[t] == each).sum()), merge, int((round_of[is_split] == each).sum()))
        )
        item, merge = item + rounds[-1].items, merge + rounds[-1].merges
    return items[longest_first], merges, tuple(rounds)


def _capacity(tile: TileShape, group: int, sizes: Sizes) -> Launch:
    """What any plan within `sizes` fits."""
    tiles = sizes.rows // (tile.block_m // group) + sizes.segments
    merges = min(tiles, sizes.partials // 2)
    return Launch(tile, sizes.rows, sizes.partials, (Round(0, tiles + sizes.partials, 0, merges),))


def _upload(
    lists: tuple[np.ndarray, ...], launch: Launch, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """One int32 tensor of all lists, and its views, padded to `launch`: items and merges of no rows, unseeing rows."""
    shapes = ((launch.rows, 2), (launch.items, ITEM_FIELDS), (launch.merges, MERGE_FIELDS))
    counts = [int(np.prod(shape)) for shape in shapes]
    offsets = np.cumsum([0, *(-(-count // SECTION_ALIGN) * SECTION_ALIGN for count in counts)])
    host = torch.zeros(int(offsets[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for values, offset in zip(lists, offsets, strict=False):
        flat[offset : offset + values.size] = values.ravel()
    table = host.to(device, non_blocking=True)
    sections = zip(offsets, counts, shapes, strict=False)
    return table, [table[offset : offset + count].view(shape) for offset, count, shape in sections]
