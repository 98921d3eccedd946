"""How the segments of a pass are cut into tiles and pieces: arithmetic on the host, no tensor.

A row's sums are taken in an order that its own segment decides: the blocks of its prefix, cut into pieces by the
prefix's length alone, then the blocks of its own keys, counted from where they begin. So a row's result has the
same bits, whatever else is in the pass, and whichever rows share its tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from d3serve.kernels.attention_tiles import TileShape
from d3serve.kernels.segments import LongAttention, Segment

# A prefix is cut so that few questions on a long state still fill the device. A block of 64 keys takes an H200
# 1.8 us; starting an item and storing its result take as long as START_BLOCKS.
START_BLOCKS = 6
PIECE_BLOCKS = 64  # in a long prefix
SHORT_PIECE_BLOCKS = 32  # while there are at most SHORT_PIECES of them
SHORT_PIECES = 4
MAX_PIECES = 17
# Of more than SHORT_PIECES the last has so much of another's length: short items fill the gaps that long ones leave.
LAST_PIECE = 0.4
# Pairs of a query row and a key that are launched as one step: 40 ms of an H200 at 24 heads of 256.
STEP_PAIRS = 10**9
SPLIT_ROWS = 1024  # a longer segment fills the device with whole tiles, and shares none


class Tiles(NamedTuple):
    """Columns of equal length, one entry a tile; `attention_plan` explains the words."""

    row: np.ndarray  # its first query row
    rows: np.ndarray
    open_begin: np.ndarray  # pool rows that all of its rows see whole: a shared prefix, or blocks of own keys
    open_end: np.ndarray
    first_edge: np.ndarray  # into `Cut.edges`: blocks of own keys, of which each row sees its own range only
    edges: np.ndarray  # how many
    pieces: np.ndarray  # into how many the open range is cut

    @property
    def unmerged(self) -> np.ndarray:
        """Partial slots of each tile: one a piece, none for a tile in one piece."""
        return np.where(self.pieces > 1, self.pieces, 0)

    def open_blocks(self, block_n: int) -> np.ndarray:
        """Key blocks of the open range."""
        return ceil_div(self.open_end - self.open_begin, block_n)

    def cost(self, block_n: int) -> np.ndarray:
        """Time that each takes, in blocks."""
        return self.open_blocks(block_n) + self.edges + START_BLOCKS * self.pieces


class DenseBlock(NamedTuple):
    """A long both-ways block without a prefix: a library's dense attention is faster than any tile loop."""

    start: int
    length: int
    own_start: int
    step_rows: int  # query rows of one step
    attention: LongAttention = "ours"


@dataclass(frozen=True)
class Cut:
    """The tiles of a pass, and what their rows may see; `dense` blocks have none."""

    tile: TileShape
    group: int
    dense: tuple[DenseBlock, ...]
    segments: int
    rows: int  # that q must have at least
    pool_rows: int
    row_ranges: np.ndarray  # [rows, 2]: first and past-the-last own pool row that a query row sees
    edges: np.ndarray  # [blocks, 2]: first and past-the-last pool row of every block of own keys
    tiles: Tiles

    @property
    def partials(self) -> int:
        """Unmerged results of the pass: what `Sizes.partials` must hold."""
        return int(self.tiles.unmerged.sum())


def cut_segments(
    segments: Sequence[Segment],
    *,
    causal: bool,
    group: int,
    tile: TileShape,
    dense: Sequence[DenseBlock] = (),
) -> Cut:
    """Cut a pass: questions of one state share tiles where that is less work.

    Args:
        segments: in order of their rows, which do not overlap; empty ones are skipped.
        causal: whether a row sees its own block only up to itself.
        group: query heads a key/value head.
        tile: see `TileShape`.
        dense: segments that need no tiles.

    Raises:
        ValueError: segments overlap or are out of order, a field is negative, or the group exceeds the tile.
    """
    if group > tile.block_m:
        raise ValueError(f"a group of {group} query heads does not fit a tile of {tile.block_m}")
    spans = _spans(segments)
    rows, own_end, prefix_end = (
        int((spans[:, begin] + spans[:, length]).max(initial=0)) for begin, length in ((0, 1), (2, 1), (3, 4))
    )
    tiled = spans[~np.isin(spans[:, 0], [block.start for block in dense])]
    return Cut(
        tile=tile,
        group=group,
        dense=tuple(dense),
        segments=len(spans),
        rows=rows,
        pool_rows=max(own_end, prefix_end),
        row_ranges=_row_ranges(tiled, rows, causal),
        edges=_edges(tiled, tile.block_n),
        tiles=_shared_tiles(tiled, causal, tile, tile.block_m // group),
    )


def ceil_div(a: np.ndarray, b: int) -> np.ndarray:
    """Quotient, rounded up."""
    return -(-a // b)


def steps(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(owner, index within owner) of each element when owner i has `lengths[i]` of them."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def piece_ends(blocks: np.ndarray, pieces: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and past-the-last open block of piece `index`: all are of one length, but for a short last one."""
    length = blocks / np.where(pieces > SHORT_PIECES, pieces - 1 + LAST_PIECE, pieces)
    first, last = (np.rint(np.minimum(i * length, blocks)).astype(np.int64) for i in (index, index + 1))
    return first, last


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


def _row_ranges(spans: np.ndarray, rows: int, causal: bool) -> np.ndarray:
    owner, index = steps(spans[:, 1])
    ranges = np.zeros((rows, 2), dtype=np.int64)
    at, begin = spans[owner, 0] + index, spans[owner, 2]
    ranges[at, 0] = begin
    ranges[at, 1] = begin + (index + 1 if causal else spans[owner, 1])
    return ranges


def _edges(spans: np.ndarray, block_n: int) -> np.ndarray:
    owner, index = steps(ceil_div(spans[:, 1], block_n))
    begin = spans[owner, 2] + index * block_n
    return np.stack((begin, np.minimum(begin + block_n, spans[owner, 2] + spans[owner, 1])), axis=1)


def _shared_tiles(spans: np.ndarray, causal: bool, tile: TileShape, tile_rows: int) -> Tiles:
    """Tiles over each segment or over each run of questions of one state, whichever is less work."""
    each = np.arange(len(spans))
    follows = np.zeros(len(spans), dtype=bool)
    before, after = spans[:-1], spans[1:]
    follows[1:] = (
        (before[:, 0] + before[:, 1] == after[:, 0])
        & (before[:, 3:] == after[:, 3:]).all(axis=1)
        & (after[:, 4] > 0)
        & (np.maximum(before[:, 1], after[:, 1]) <= SPLIT_ROWS)
    )
    apart = _tiles(spans, each, causal, tile, tile_rows)
    if not follows.any():
        return apart
    run_of = np.cumsum(~follows) - 1
    shared = _tiles(spans, each[~follows], causal, tile, tile_rows)
    runs = [run_of[np.searchsorted(spans[:, 0], tiles.row, "right") - 1] for tiles in (apart, shared)]
    work = [
        np.bincount(run, tiles.cost(tile.block_n), run_of[-1] + 1)
        for run, tiles in zip(runs, (apart, shared), strict=True)
    ]
    shares = work[1] < work[0]
    kept = (~shares[runs[0]], shares[runs[1]])
    return Tiles(*(np.concatenate((a[kept[0]], s[kept[1]])) for a, s in zip(apart, shared, strict=True)))


def _tiles(spans: np.ndarray, heads: np.ndarray, causal: bool, tile: TileShape, tile_rows: int) -> Tiles:
    """Tiles of nearly equal height over stretches of segments; `heads` are the first segments of each."""
    lengths = np.add.reduceat(spans[:, 1], heads) if len(heads) else np.zeros(0, dtype=np.int64)
    counts = ceil_div(lengths, tile_rows)
    owner, index = steps(counts)
    row = spans[heads[owner], 0] + index * lengths[owner] // counts[owner]
    end = spans[heads[owner], 0] + (index + 1) * lengths[owner] // counts[owner]
    first, last = (np.searchsorted(spans[:, 0], r, "right") - 1 for r in (row, end - 1))
    own_blocks = ceil_div(spans[:, 1], tile.block_n)
    edge_of = np.cumsum(own_blocks) - own_blocks
    seen = (end - 1 - spans[last, 0]) // tile.block_n + 1 if causal else own_blocks[last]
    # Without a prefix, the blocks that every row of the tile sees whole are the open range.
    whole = (row - spans[first, 0] + 1) // tile.block_n if causal else own_blocks[first]
    _, length, own_start, prefix_start, prefix_length = spans[first].T
    has_prefix = prefix_length > 0
    own_end = own_start + np.minimum(whole * tile.block_n, length)
    open_begin = np.where(has_prefix, prefix_start, own_start)
    open_end = np.where(has_prefix, prefix_start + prefix_length, own_end)
    first_edge = edge_of[first] + np.where(has_prefix, 0, whole)
    pieces = np.where(length > SPLIT_ROWS, 1, _pieces(ceil_div(open_end - open_begin, tile.block_n)))
    return Tiles(row, end - row, open_begin, open_end, first_edge, edge_of[last] + seen - first_edge, pieces)


def _pieces(blocks: np.ndarray) -> np.ndarray:
    """Into how many pieces ranges of so many key blocks are cut."""
    short = np.clip(ceil_div(blocks, SHORT_PIECE_BLOCKS), 1, SHORT_PIECES)
    whole = np.clip((blocks + PIECE_BLOCKS // 2) // PIECE_BLOCKS, short, MAX_PIECES - 1)
    return whole + (whole >= SHORT_PIECES)
