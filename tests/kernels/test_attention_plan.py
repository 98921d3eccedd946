"""The work lists of an attention pass: every visible pair exactly once, even work, fixed sizes when padded."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3serve.kernels import prefix_bidir
from d3serve.kernels.attention_cut import MAX_PIECES, SPLIT_ROWS, DenseBlock, cut_segments
from d3serve.kernels.attention_plan import Sizes, plan_tiles
from d3serve.kernels.attention_tiles import LARGE, TileShape, choose_tile
from d3serve.kernels.cards import Card
from d3serve.kernels.segments import AttentionShape, Segment

CPU = torch.device("cpu")
TILE = TileShape(32, 1, 4, 2, overlap=True)  # blocks of one key, so that short ranges are cut too


def plan(segments, *, causal=False, group=6, tile=TILE, **options):
    cut = cut_segments(segments, causal=causal, group=group, tile=tile)
    return plan_tiles(cut, kv_heads=2, device=CPU, **options)


def questions(count, length, prefix, *, row=0, pool=1000):
    return [Segment(row + i * length, length, pool + i * length, 0, prefix) for i in range(count)]


def visits(made, pool_rows):
    """How often each query row meets each pool row when the lists are followed to the letter: [rows, pool]."""
    met = np.zeros((made.launch.rows, pool_rows), dtype=int)
    ranges, edges, items = made.row_ranges.numpy(), made.edges.numpy(), made.items.numpy()
    for first, count, *_ in made.launch.rounds:
        for row, rows, open_begin, open_end, first_edge, edge_count, _, _ in items[first : first + count]:
            met[row : row + rows, open_begin:open_end] += 1
            for begin, end in edges[first_edge : first_edge + edge_count]:
                for r in range(row, row + rows):
                    met[r, max(begin, ranges[r, 0]) : max(min(end, ranges[r, 1]), 0)] += 1
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
    for length in draw(st.lists(lengths | st.integers(60, 300), max_size=4)):
        segments.append(Segment(row, length, pool))
        states.append((pool, length))
        row, pool = row + length, pool + length + draw(st.integers(0, 2))
    for start, length in states:
        for question in draw(st.lists(lengths, max_size=6)):
            segments.append(Segment(row, question, pool, start, length))
            gap = draw(st.sampled_from((0, 0, 0, 3)))
            row, pool = row + question + gap, pool + question + draw(st.sampled_from((0, 0, 0, 2)))
    return segments


@given(passes(), st.booleans(), st.sampled_from((1, 2, 3, 6, 8)))
@settings(max_examples=60, deadline=None)
def test_every_visible_pair_is_met_exactly_once(segments, causal, group):
    made = plan(segments, causal=causal, group=group)
    pool_rows = max(made.pool_rows, 1)
    np.testing.assert_array_equal(
        visits(made, pool_rows), wanted(segments, made.launch.rows, pool_rows, causal)
    )


@given(passes(), st.booleans(), st.integers(MAX_PIECES + 1, 40))
@settings(max_examples=60, deadline=None)
def test_the_pieces_of_a_tile_take_slots_in_a_row_of_one_round_and_are_merged_once(
    segments, causal, max_partials
):
    made = plan(segments, causal=causal, max_partials=max_partials)
    all_items, all_merges = made.items.numpy(), made.merges.numpy()
    assert made.launch.partials <= max_partials
    for first, count, first_merge, merges, _ in made.launch.rounds:
        items = all_items[first : first + count]
        partial = items[items[:, 6] >= 0]
        assert len(set(partial[:, 6])) == len(partial)
        assert partial[:, 6].max(initial=-1) < made.launch.partials
        owner = {slot: (row, rows) for row, rows, slot in partial[:, [0, 1, 6]]}
        merged = []
        for row, rows, slot, pieces in all_merges[first_merge : first_merge + merges]:
            assert pieces > 1
            assert {owner[each] for each in range(slot, slot + pieces)} == {(row, rows)}
            merged += range(slot, slot + pieces)
        assert sorted(merged) == sorted(owner)


@given(passes(), st.booleans(), st.sampled_from((0, 3)), st.sampled_from((1, 16)))
@settings(max_examples=100, deadline=None)
def test_a_padded_plan_has_fixed_sizes_and_does_the_same_work(segments, causal, more, block_n):
    tile = TILE._replace(block_n=block_n)
    cut = cut_segments(segments, causal=causal, group=6, tile=tile)
    sizes = Sizes(cut.rows + more, cut.segments + more, cut.partials + more)
    exact = plan(segments, causal=causal, tile=tile)
    padded = plan(segments, causal=causal, tile=tile, sizes=sizes)
    assert padded.launch == plan([], tile=tile, sizes=sizes).launch
    assert padded.table.shape == plan([], tile=tile, sizes=sizes).table.shape
    assert len(padded.launch.rounds) == 1
    rows, pool_rows = exact.launch.rows, max(exact.pool_rows, 1)
    met = visits(padded, pool_rows)
    np.testing.assert_array_equal(met[:rows], visits(exact, pool_rows))
    assert not met[rows:].any()
    assert padded.items.numpy()[:, 6].max(initial=-1) < max(padded.launch.partials, 1)
    extra = padded.merges.numpy()[exact.launch.merges :]
    assert not extra.any(), "a padded merge has no rows and no pieces"


def orders(made, segment):
    """For each row of a segment, the pieces of its sums: counted from where prefix and own block begin."""
    ranges, edges = made.row_ranges.numpy(), made.edges.numpy()
    found = []
    for r in range(segment.start, segment.start + segment.length):
        pieces = []
        for row, rows, open_begin, open_end, first_edge, edge_count, slot, _ in made.items.numpy():
            if row <= r < row + rows:
                own = edges[first_edge : first_edge + edge_count] - segment.own_start
                mine = own[(own[:, 1] > 0) & (own[:, 0] < ranges[r, 1] - segment.own_start)]
                base = segment.prefix_start if segment.prefix_length else segment.own_start
                pieces.append((open_begin - base, open_end - base, mine.tolist(), slot >= 0))
        found.append(sorted(pieces))
    return found


@given(passes(), st.booleans(), st.sampled_from((1, 6, 16)), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_the_sums_of_a_row_are_taken_in_one_order_in_any_company(segments, causal, block_n, random):
    tile = TILE._replace(block_n=block_n)
    crowd = plan(segments, causal=causal, tile=tile, max_partials=MAX_PIECES + 1)
    for segment in segments:
        moved = segment._replace(start=random.randint(0, 50), own_start=random.randint(100, 200))
        if segment.prefix_length:
            moved = moved._replace(prefix_start=random.randint(1, 50))
        assert orders(crowd, segment) == orders(plan([moved], causal=causal, tile=tile), moved)


def item_blocks(made):
    items = made.items.numpy()
    return -(-(items[:, 3] - items[:, 2]) // made.launch.tile.block_n) + items[:, 5]


@pytest.mark.parametrize(("rows", "keys"), [(512, 24_576), (512, 117_000), (100, 24_576), (400, 65_536)])
def test_few_rows_over_many_keys_make_work_for_many_processors(rows, keys):
    made = plan([Segment(0, rows, keys, 0, keys)], tile=LARGE)
    work, tiles = item_blocks(made), made.launch.merges
    assert len(work) >= 30
    whole, last = work[:-tiles], work[-tiles:]
    assert whole.max() <= whole.min() + 1
    assert last.max() < 0.7 * whole.min(), "short ones fill what the others leave"


@pytest.mark.parametrize("rows", [100, 2_048, 8_192])
def test_a_range_that_is_short_or_a_segment_that_is_long_is_not_split(rows):
    made = plan([Segment(0, rows, 0)], tile=LARGE)
    assert made.launch.merges == 0
    assert made.launch.items == -(-rows // 21)


def test_many_pieces_are_done_in_rounds():
    launch = plan(questions(64, 100, 60_000, pool=60_000), tile=LARGE).launch
    assert len(launch.rounds) > 3
    assert launch.partials <= 1_024


def test_a_long_pass_is_launched_in_steps_of_whole_waves():
    segments = [Segment(0, 3_000, 0), *questions(4, 60, 3_000, row=3_000, pool=3_000)]
    whole, cut = plan(segments, tile=LARGE), plan(segments, tile=LARGE, step_pairs=10**6, wave=5)
    assert len(whole.launch.rounds) == 1
    assert len(cut.launch.rounds) > 8
    assert all(each.pairs <= 10**6 and each.items % 5 == 0 for each in cut.launch.rounds[:-1])
    assert [each.merges for each in cut.launch.rounds[:-1]] == [0] * (len(cut.launch.rounds) - 1)
    assert cut.launch.merges == whole.launch.merges
    assert torch.equal(cut.table, whole.table)
    assert whole.pairs == cut.pairs
    assert 3_240 * 3_000 <= whole.pairs <= 3_240 * 3_200


def test_an_item_larger_than_a_step_is_a_step_of_its_own():
    made = plan([Segment(0, 200, 0)], tile=LARGE, step_pairs=10)
    assert [each.items for each in made.launch.rounds] == [1] * 10


def test_a_long_tile_starts_before_short_ones():
    segments = [
        Segment(0, 2_000, 0),
        *questions(1, 20, 2_000, row=2_000, pool=2_000),
        Segment(2_020, 300, 2_020),
    ]
    assert (np.diff(item_blocks(plan(segments, tile=LARGE))) <= 0).all()


def test_short_questions_of_one_state_share_tiles():
    made = plan(questions(16, 5, 150), tile=LARGE)
    items = made.items.numpy()
    assert items[:, 1].tolist() == [20] * 4
    assert items[:, 5].tolist() == [4] * 4
    assert (made.edges.numpy()[:, 1] - made.edges.numpy()[:, 0] == 5).all()


def test_questions_share_no_tile_where_it_saves_nothing():
    items = plan([Segment(0, 19, 900, 0, 64), Segment(19, 42, 919, 0, 64)], tile=LARGE).items.numpy()
    assert sorted(items[:, 1]) == [19, 21, 21]
    assert (items[:, 5] == 1).all()


@pytest.mark.parametrize(
    "second",
    [
        Segment(6, 5, 1_005, 0, 150),  # a row between
        Segment(5, 5, 1_005, 0, 149),
        Segment(5, 5, 1_005, 1, 150),
    ],
)
def test_only_neighbours_on_one_state_share_a_tile(second):
    items = plan([Segment(0, 5, 1_000, 0, 150), second], tile=LARGE).items.numpy()
    assert sorted(items[items[:, 0] < 6, 1])[0] == 5


def test_a_question_too_long_to_be_split_shares_no_tile_with_one_that_is():
    short, long = Segment(0, 3, 9_000, 0, 6_400), Segment(3, SPLIT_ROWS + 2, 9_003, 0, 6_400)
    both = plan([short, long], tile=LARGE)
    for segment in (short, long):
        assert orders(both, segment) == orders(plan([segment], tile=LARGE), segment)


def test_a_both_ways_block_without_a_prefix_needs_no_edge():
    items = plan([Segment(0, 100, 7)], tile=LARGE).items.numpy()
    assert (items[:, 5] == 0).all()
    assert (items[:, 2].min(), items[:, 3].max()) == (7, 107)


def test_a_causal_block_masks_its_diagonal_only():
    items = plan([Segment(0, 30, 0)], causal=True).items.numpy()
    assert (items[:, 5] < items[:, 1]).all()


def test_no_segments_no_work():
    for segments in ([], [Segment(0, 0, 0)]):
        launch = plan(segments).launch
        assert (launch.rows, launch.items, launch.merges, launch.rounds) == (0, 0, 0, ())


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
    with pytest.raises(ValueError, match="65 rows"):
        plan([Segment(0, 65, 0)], sizes=Sizes(64, 1, 99))
    with pytest.raises(ValueError, match="in 3 segments"):
        plan(questions(3, 5, 10), sizes=Sizes(64, 2, 99))
    with pytest.raises(ValueError, match="with 2 partials"):
        plan(questions(1, 5, 40), sizes=Sizes(64, 2, 1))
    dense = cut_segments([Segment(0, 9, 0)], causal=False, group=6, tile=TILE, dense=[DenseBlock(0, 9, 0, 9)])
    with pytest.raises(ValueError, match="dense block"):
        plan_tiles(dense, kv_heads=2, device=CPU, sizes=Sizes(64, 2, 1))
    with pytest.raises(ValueError, match="group of 33"):
        plan([Segment(0, 1, 0)], group=33)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("kilobytes", [100, 164, 227])
def test_the_tile_fits_the_device(itemsize, capability, kilobytes):
    card = Card(capability, kilobytes * 1024, 100)
    tile = choose_tile(group=6, head_dim=256, itemsize=itemsize, card=card)
    assert tile.shared_bytes(256, itemsize, card) <= card.shared_bytes


def test_a_device_too_small_is_named():
    with pytest.raises(ValueError, match="16384 bytes of shared memory"):
        choose_tile(group=6, head_dim=256, itemsize=2, card=Card((9, 0), 16 * 1024, 100))


def test_one_padded_launch_serves_short_and_long_states():
    shape = AttentionShape(False, 24, 4, 256, torch.bfloat16, CPU)
    short, long = [Segment(0, 150, 0), *questions(4, 100, 150, row=150)], questions(4, 100, 24_576)
    cuts = [prefix_bidir.cut_attention(segments, shape) for segments in (short, long)]
    partials = [cut.partials for cut in cuts]
    assert partials == [0, 140]
    sizes = Sizes(1_024, 8, max(partials))
    plans = [prefix_bidir.plan_attention(cut, shape, sizes=sizes) for cut in cuts]
    assert plans[0].launch == plans[1].launch
    with pytest.raises(ValueError, match="5 query heads over 2"):
        prefix_bidir.cut_attention(short, shape._replace(heads=5, kv_heads=2))
