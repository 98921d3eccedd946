"""The work lists of an attention pass: every visible pair exactly once, even work, fixed sizes when padded."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3serve.kernels import prefix_bidir
from d3serve.kernels.attention_plan import plan_tiles
from d3serve.kernels.attention_tiles import LONG, SHORT, TileShape, choose_tile
from d3serve.kernels.segments import Segment

CPU = torch.device("cpu")
TILE = TileShape(32, 16, 4, 2, per_sm=1, overlap=True)


def plan(segments, *, causal=False, group=6, tile=TILE, slots=8, sizes=None):
    return plan_tiles(
        segments, causal=causal, group=group, kv_heads=2, tile=tile, slots=slots, device=CPU, sizes=sizes
    )


def questions(count, length, prefix, *, row=0, pool=1000):
    return [Segment(row + i * length, length, pool + i * length, 0, prefix) for i in range(count)]


def visits(made, pool_rows):
    """How often each query row meets each pool row when the lists are followed to the letter: [rows, pool]."""
    met = np.zeros((made.launch.rows, pool_rows), dtype=int)
    ranges, starts, items = (x.numpy() for x in (made.row_ranges, made.program_starts, made.items))
    for program in range(made.launch.programs):
        for item in items[starts[program] : starts[program + 1]]:
            row, rows, open_begin, open_end, edge_begin, edge_end = item[:6]
            met[row : row + rows, open_begin:open_end] += 1
            for r in range(row, row + rows):
                met[r, max(edge_begin, ranges[r, 0]) : max(min(edge_end, ranges[r, 1]), 0)] += 1
    return met


def wanted(segments, rows, pool_rows, causal):
    met = np.zeros((rows, pool_rows), dtype=int)
    for s in segments:
        for i in range(s.length):
            met[s.start + i, s.prefix_start : s.prefix_start + s.prefix_length] += 1
            met[s.start + i, s.own_start : s.own_start + (i + 1 if causal else s.length)] += 1
    return met


@st.composite
def passes(draw):
    """States, then runs of their questions, with gaps in the rows and in the pool now and then."""
    lengths = st.integers(0, 40)
    segments, row, pool = [], draw(st.integers(0, 3)), draw(st.integers(0, 5))
    states = []
    for length in draw(st.lists(lengths, max_size=4)):
        segments.append(Segment(row, length, pool))
        states.append((pool, length))
        row, pool = row + length, pool + length + draw(st.integers(0, 2))
    for start, length in states:
        for question in draw(st.lists(lengths, max_size=6)):
            segments.append(Segment(row, question, pool, start, length))
            gap = draw(st.sampled_from((0, 0, 0, 3)))
            row, pool = row + question + gap, pool + question + draw(st.sampled_from((0, 0, 0, 2)))
    return segments


@given(passes(), st.booleans(), st.sampled_from((1, 2, 3, 6, 8)), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_every_visible_pair_is_met_exactly_once(segments, causal, group, slots):
    made = plan(segments, causal=causal, group=group, slots=slots)
    pool_rows = max(made.pool_rows, 1)
    np.testing.assert_array_equal(
        visits(made, pool_rows), wanted(segments, made.launch.rows, pool_rows, causal)
    )


@given(passes(), st.booleans(), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_pieces_of_a_tile_take_slots_in_a_row_and_are_merged_once(segments, causal, slots):
    made = plan(segments, causal=causal, slots=slots)
    items = made.items.numpy()
    partial = items[items[:, 6] >= 0]
    assert sorted(partial[:, 6]) == list(range(made.launch.partials))
    owner = {slot: (row, rows) for row, rows, slot in partial[:, [0, 1, 6]]}
    merged = []
    for row, rows, first, pieces in made.merges.numpy():
        assert pieces > 1
        assert {owner[slot] for slot in range(first, first + pieces)} == {(row, rows)}
        merged += range(first, first + pieces)
    assert sorted(merged) == sorted(owner)


@given(passes(), st.booleans(), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_a_padded_plan_has_fixed_sizes_and_does_the_same_work(segments, causal, slots):
    exact = plan(segments, causal=causal, slots=slots)
    padded = plan(segments, causal=causal, slots=slots, sizes=(1_200, 40))
    assert padded.launch == plan([], slots=slots, sizes=(1_200, 40)).launch
    assert padded.table.shape == plan([], slots=slots, sizes=(1_200, 40)).table.shape
    rows, pool_rows = exact.launch.rows, max(exact.pool_rows, 1)
    met = visits(padded, pool_rows)
    np.testing.assert_array_equal(met[:rows], visits(exact, pool_rows))
    assert not met[rows:].any()
    assert padded.items.numpy()[:, 6].max() < padded.launch.partials
    extra = padded.merges.numpy()[exact.launch.merges :]
    assert not extra.any(), "a padded merge has no rows and no pieces"


def program_blocks(made):
    items, starts = made.items.numpy(), made.program_starts.numpy()
    block_n = made.launch.tile.block_n
    blocks = -(-(items[:, 3] - items[:, 2]) // block_n) - (-(items[:, 5] - items[:, 4]) // block_n)
    return np.add.reduceat(blocks, starts[:-1])


@pytest.mark.parametrize(("rows", "keys"), [(512, 24_576), (512, 117_000), (100, 24_576), (400, 65_536)])
def test_few_rows_over_many_keys_fill_the_device_evenly(rows, keys):
    made = plan([Segment(0, rows, keys, 0, keys)], tile=LONG, slots=33)
    work = program_blocks(made)
    assert len(work) == 33
    assert work.max() < 1.05 * work.mean()


def test_a_padded_plan_has_room_for_every_piece():
    segments = [Segment(0, 512, 24_576, 0, 24_576)]
    exact, padded = (plan(segments, tile=LONG, slots=33, sizes=sizes) for sizes in (None, (512, 1)))
    assert exact.launch.partials > 33
    assert all(small <= large for small, large in zip(exact.launch[1:], padded.launch[1:], strict=True))
    assert padded.items.numpy()[:, 6].max() == exact.launch.partials - 1


@pytest.mark.parametrize("rows", [2_048, 8_192])
def test_many_tiles_are_not_split(rows):
    made = plan([Segment(0, rows, 0)], tile=LONG, slots=33)
    assert made.launch.merges == 0
    assert made.launch.programs == -(-rows // 21)


def test_a_long_tile_starts_before_short_ones():
    segments = [
        Segment(0, 2_000, 0),
        *questions(1, 20, 2_000, row=2_000, pool=2_000),
        Segment(2_020, 300, 2_020),
    ]
    work = program_blocks(plan(segments, tile=LONG, slots=4))
    assert (np.diff(work) <= 0).all()


def test_short_questions_of_one_state_share_tiles_and_long_ones_do_not():
    heights = plan(questions(16, 5, 150), tile=LONG, slots=4).items.numpy()[:, 1]
    assert heights.sum() == 80
    assert len(heights) == 4
    apart = plan(questions(4, 42, 150), tile=LONG, slots=4).items.numpy()
    assert (apart[:, 1] == 21).all()
    assert (apart[:, 5] - apart[:, 4] == 42).all()


def test_questions_apart_in_the_pool_share_no_tile():
    segments = [Segment(i * 5, 5, 1_000 + i * 9, 0, 150) for i in range(4)]
    assert (plan(segments, tile=LONG).items.numpy()[:, 1] == 5).all()


def test_a_both_ways_block_without_a_prefix_needs_no_edge():
    items = plan([Segment(0, 100, 7)]).items.numpy()
    assert (items[:, 5] == items[:, 4]).all()
    assert (items[:, 2].min(), items[:, 3].max()) == (7, 107)


def test_a_causal_block_masks_its_diagonal_only():
    made = plan([Segment(0, 100, 0)], causal=True, slots=1)
    items = made.items.numpy()
    assert (items[:, 5] - items[:, 4] < items[:, 1]).all()


def test_no_segments_no_work():
    for segments in ([], [Segment(0, 0, 0)]):
        launch = plan(segments).launch
        assert (launch.rows, launch.programs, launch.items, launch.merges) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(0, 5, 0), Segment(4, 5, 10)], "in order of their rows"),
        ([Segment(5, 5, 0), Segment(0, 5, 10)], "in order of their rows"),
        ([Segment(0, -1, 0)], "negative"),
        ([Segment(0, 1, -1)], "negative"),
        ([Segment(0, 1, 2**31)], "2\\^31"),
    ],
)
def test_bad_segments_are_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        plan(segments)


def test_too_small_sizes_and_too_large_groups_are_refused():
    with pytest.raises(ValueError, match="exceed the padded sizes"):
        plan([Segment(0, 65, 0)], sizes=(64, 1))
    with pytest.raises(ValueError, match="exceed the padded sizes"):
        plan(questions(3, 5, 10), sizes=(64, 2))
    with pytest.raises(ValueError, match="group of 33"):
        plan([Segment(0, 1, 0)], group=33)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("kilobytes", [64, 100, 164, 227])
@pytest.mark.parametrize("short", [False, True])
def test_the_tile_fits_the_device(itemsize, kilobytes, short):
    tile = choose_tile(short=short, group=6, head_dim=256, itemsize=itemsize, shared_bytes=kilobytes * 1024)
    assert tile.shared_bytes(256, itemsize) <= kilobytes * 1024


def test_a_device_too_small_is_named():
    with pytest.raises(ValueError, match="16384 bytes of shared memory"):
        choose_tile(short=False, group=6, head_dim=256, itemsize=2, shared_bytes=16 * 1024)


def test_the_tile_follows_the_keys_that_a_row_sees():
    shape = {
        "causal": False,
        "heads": 24,
        "kv_heads": 4,
        "head_dim": 256,
        "dtype": torch.bfloat16,
        "device": CPU,
    }
    short = [Segment(0, 150, 0), *questions(4, 100, 150, row=150)]
    assert prefix_bidir.plan_attention(short, **shape).launch.tile == SHORT
    assert prefix_bidir.plan_attention(questions(4, 100, 24_576), **shape).launch.tile == LONG
    padded = {"max_rows": 1_024, "max_segments": 8}
    plans = [prefix_bidir.plan_attention(s, **shape, **padded) for s in (short, questions(4, 100, 24_576))]
    assert plans[0].launch == plans[1].launch, "one graph serves both"
    with pytest.raises(ValueError, match="5 query heads over 2"):
        prefix_bidir.plan_attention(short, **(shape | {"heads": 5, "kv_heads": 2}))
