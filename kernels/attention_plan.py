"""Which query rows meet which keys: the work lists of one attention pass, made on the host, uploaded once.

The words. A **tile** is a run of query rows, small enough that its rows times the query heads of one key/value head
fit BLOCK_M. A tile reads two sets of keys: the range `open`, which every row sees whole, then some blocks of
`edges`, in which each row sees `row_ranges[row]` only. So one kernel serves all segments: edges are the own keys of
questions or the diagonal of a causal block. An **item** is a tile over a piece of its keys, the last of them with
its edges, and a **merge** joins the pieces of one tile. `attention_cut` decides on tiles and pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from d3serve.kernels.attention_cut import MAX_PIECES, STEP_PAIRS, Cut, DenseBlock, Tiles, piece_ends, steps
from d3serve.kernels.attention_tiles import TileShape
from d3serve.kernels.tables import upload

ITEM_FIELDS = 8  # row, rows, open begin, open end, first edge, edges, partial slot (-1: none), unused
MERGE_FIELDS = 4  # row, rows, first partial slot, pieces
MAX_PARTIALS = 1024  # unmerged results at a time: 0.5 GB at 24 heads of 256; more are done in rounds


class Round(NamedTuple):
    """Items of a plan's lists that run together, and the merges that follow."""

    first_item: int
    items: int
    first_merge: int
    merges: int
    pairs: int  # of a query row and a key; 0 where the lists are padded


class Launch(NamedTuple):
    """All that the launches depend on besides the contents of their tensors; hashable.

    A CUDA graph captured with a plan replays every plan of an equal launch: copy the new plan's `table` into
    the captured one's. So a graph cache must have `launch` in its key.
    """

    tile: TileShape
    rows: int  # that q must have at least
    edges: int
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


@dataclass(frozen=True)
class AttentionPlan:
    """Work lists of one pass, for every layer of it. `dense` blocks are not in the lists."""

    launch: Launch
    kv_heads: int
    pool_rows: int
    dense: tuple[DenseBlock, ...]
    table: Tensor  # int32, holds the four lists below
    row_ranges: Tensor  # [rows, 2]: first and past-the-last own pool row that a query row sees
    edges: Tensor  # [edges, 2]: first and past-the-last pool row of a block of own keys
    items: Tensor  # [items, ITEM_FIELDS]
    merges: Tensor  # [merges, MERGE_FIELDS]

    @property
    def pairs(self) -> int:
        """Pairs of a query row and a key of all steps."""
        return sum(each.pairs for each in self.launch.rounds) + sum(b.length**2 for b in self.dense)


class Sizes(NamedTuple):
    """What a padded plan has room for."""

    rows: int
    segments: int
    partials: int


def plan_tiles(
    cut: Cut,
    *,
    kv_heads: int,
    device: torch.device,
    sizes: Sizes | None = None,
    max_partials: int = MAX_PARTIALS,
    step_pairs: int = STEP_PAIRS,
    wave: int = 1,
) -> AttentionPlan:
    """The work lists of a cut pass, on `device`.

    Args:
        cut: from `cut_segments`.
        kv_heads: HK; every head follows the same lists.
        device: where the lists go, in one copy.
        sizes: pad every list to what so much can need: `launch` then depends on them alone.
        max_partials: unmerged results that may wait for their merge at a time.
        step_pairs: about how much a round may hold: what waits for the device can step in between two.
        wave: items that fill the device; a round that holds so many holds a multiple of it.

    Raises:
        ValueError: `sizes` are too small, or a block is dense, which has no padded form.
    """
    if sizes is not None:
        if cut.rows > sizes.rows or cut.segments > sizes.segments or cut.partials > sizes.partials:
            raise ValueError(
                f"{cut.rows} rows in {cut.segments} segments with {cut.partials} partials exceed {sizes}"
            )
        if cut.dense:
            raise ValueError(f"a padded plan cannot hold the dense block {cut.dense[0]}")
        max_partials = cut.partials + MAX_PIECES + 1  # one round
    items, merges, rounds = _lists(cut.tiles, cut.tile.block_n, max_partials - MAX_PIECES)
    rounds = tuple(
        step for each in rounds for step in _steps(each, items, cut.tile.block_n, step_pairs, wave)
    )
    launch = Launch(cut.tile, cut.rows, len(cut.edges), min(cut.partials, max_partials), rounds)
    if sizes is not None:
        launch = _capacity(cut.tile, cut.group, sizes)
    table, views = _upload((cut.row_ranges, cut.edges, items, merges), launch, device)
    return AttentionPlan(launch, kv_heads, cut.pool_rows, cut.dense, table, *views)


def _lists(
    tiles: Tiles, block_n: int, round_partials: int
) -> tuple[np.ndarray, np.ndarray, tuple[Round, ...]]:
    """(items, merges, rounds) as the kernels read them; a round's last tile may exceed `round_partials`."""
    is_split = tiles.pieces > 1
    round_of, first_slot = np.divmod(np.cumsum(tiles.unmerged) - tiles.unmerged, round_partials)
    t, index = steps(tiles.pieces)
    first, last = piece_ends(tiles.open_blocks(block_n)[t], tiles.pieces[t], index)
    edges = np.where(index == tiles.pieces[t] - 1, tiles.edges[t], 0)
    items = np.stack(
        (
            tiles.row[t],
            tiles.rows[t],
            tiles.open_begin[t] + first * block_n,
            np.minimum(tiles.open_begin[t] + last * block_n, tiles.open_end[t]),
            tiles.first_edge[t],
            edges,
            np.where(is_split[t], first_slot[t] + index, -1),
            np.zeros_like(t),
        ),
        axis=1,
    )
    longest_first = np.lexsort((first - last - edges, round_of[t]))  # an item starts whenever one ends
    merges = np.stack((tiles.row, tiles.rows, first_slot, tiles.pieces), axis=1)[is_split]
    rounds, item, merge = [], 0, 0
    for each in range(int(round_of.max(initial=-1)) + 1):
        here, merged = int((round_of[t] == each).sum()), int((round_of[is_split] == each).sum())
        rounds.append(Round(item, here, merge, merged, 0))
        item, merge = item + rounds[-1].items, merge + rounds[-1].merges
    return items[longest_first], merges, tuple(rounds)


def _steps(whole: Round, items: np.ndarray, block_n: int, step_pairs: int, wave: int) -> Iterator[Round]:
    """A round as shorter ones of its items, in order; the last has the merges."""
    _, rows, begin, end, _, edges, *_ = items[whole.first_item : whole.first_item + whole.items].T
    done = np.cumsum(rows * (end - begin + edges * block_n))
    first = 0
    while first < whole.items:
        before = int(done[first - 1]) if first else 0
        count = max(1, int(np.searchsorted(done, before + step_pairs, "right")) - first)
        if first + count < whole.items and count > wave:
            count -= count % wave
        last = first + count == whole.items
        pairs = int(done[first + count - 1]) - before
        merges = whole.merges if last else 0
        yield Round(whole.first_item + first, count, whole.first_merge, merges, pairs)
        first += count


def _capacity(tile: TileShape, group: int, sizes: Sizes) -> Launch:
    """What any plan within `sizes` fits."""
    tiles = sizes.rows // (tile.block_m // group) + sizes.segments
    merges = min(tiles, sizes.partials // 2)
    edges = sizes.rows // tile.block_n + sizes.segments
    return Launch(tile, sizes.rows, edges, sizes.partials, (Round(0, tiles + sizes.partials, 0, merges, 0),))


def _upload(
    lists: tuple[np.ndarray, ...], launch: Launch, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """One int32 tensor of all lists, and its views, padded to `launch`: items and merges of no rows, unseeing rows."""
    shapes = ((launch.rows, 2), (launch.edges, 2), (launch.items, ITEM_FIELDS), (launch.merges, MERGE_FIELDS))
    return upload(lists, torch.int32, device, shapes)
