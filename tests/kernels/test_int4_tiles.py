"""Which programs multiply four-bit weights on Hopper: they cover the weight, fit the card, and are those measured."""

import itertools

import pytest
import torch

from d3serve.kernels import int4, int4_hopper
from d3serve.kernels.int4_hopper import TILES, tiles_of

PROCESSORS = 132
SHARED_BYTES, REGISTERS = 233_472, 65_536  # of a processor
ROWS_27B = (5_120, 14_336, 16_384, 34_816)


def shapes(tokens, rows):
    return [(tile.sets, tile.block, part) for tile, part in tiles_of(tokens, rows, PROCESSORS)]


@pytest.mark.parametrize("processors", [1, 78, 132])
def test_the_parts_are_the_whole_weight(processors):
    for tokens, rows in itertools.product((1, 33, 250, 1_536), (1, 70, 640, *ROWS_27B)):
        parts = tiles_of(tokens, rows, processors)
        assert sum(part for _, part in parts) == rows
        assert len(parts) <= 2
        if len(parts) == 2:  # whole tiles: no row of the weight is read for both
            tile, whole = parts[0]
            assert whole % (tile.sets * int4_hopper.ROWS.value) == 0


@pytest.mark.parametrize("tile", TILES)
def test_a_tile_leaves_room_for_what_shares_its_processor(tile):
    group = 2 * tile.block * int4_hopper.GROUP.value + 4 * tile.sets * 64 * int4_hopper.WORDS.value
    scratch = 64 * 64  # through which a set stores, and barriers
    assert tile.held * (tile.slots * group + scratch) <= SHARED_BYTES
    if tile.held == 2:
        assert (
            2 * 256 * int4_hopper.SHARED <= REGISTERS
        )  # four warps that multiply, one that fetches, padded to four
    else:
        sets, fetching = 128 * int4_hopper.MULTIPLYING.value, 128 * int4_hopper.FETCHING.value
        assert tile.sets * sets + fetching <= REGISTERS


@pytest.mark.parametrize(
    ("tokens", "rows", "wanted"),
    [
        (1, 5_120, [(1, 32, 5_120)]),
        (60, 34_816, [(1, 64, 34_816)]),
        (128, 16_384, [(1, 128, 16_384)]),
        (180, 16_384, [(2, 192, 16_384)]),
        (250, 5_120, [(2, 96, 5_120)]),  # 120 of the 132 processors, where whole tiles take 80
        (250, 14_336, [(2, 256, 14_336)]),
        (250, 34_816, [(2, 256, 33_792), (1, 32, 1_024)]),  # two rounds, and not a third of eight programs
        (400, 5_120, [(2, 192, 5_120)]),
    ],
)
def test_the_tiles_are_those_that_an_h200_liked(tokens, rows, wanted):
    assert shapes(tokens, rows) == wanted


def test_what_follows_in_memory_fills_the_last_tile():
    buffer = torch.arange(64 * 16, dtype=torch.float32).view(64, 16)
    rows = buffer[8:18]
    whole = int4_hopper._whole_tiles(rows, 32)
    assert whole.shape == (32, 16)
    assert whole.data_ptr() == rows.data_ptr()
    assert torch.equal(whole[:10], rows)
    assert torch.equal(int4_hopper._whole_tiles(buffer[8:18, 4:12], 32), buffer[8:40, 4:12])


@pytest.mark.parametrize("rows", [slice(40, 60), slice(33, 64)])
def test_nothing_is_read_behind_the_memory(rows):
    buffer = torch.zeros(64, 16)
    assert int4_hopper._whole_tiles(buffer[rows], 32) is not None
    assert int4_hopper._whole_tiles(buffer[rows], 32).shape[0] <= 64 - rows.start


def test_passes_that_stay_packed_have_tiles_of_their_own():
    assert max(tile.block for tile in TILES) < int4.PACKED_ROWS
