"""The tables of a pass: every row in exactly one place, and what cannot be laid out is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3serve.kernels.recurrence_plan import CHUNK, TILE, RecurrenceSizes, plan_recurrence, recurrence_sizes
from d3serve.kernels.segments import Segment

segment_lists = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from(["cached", "state", "question"])), min_size=1, max_size=12
)


def build(kinds):
    """Segments of these lengths; a question follows the last state before it, or starts from zeros."""
    segments, row, state = [], 0, -1
    for i, (length, kind) in enumerate(kinds):
        final = i if kind == "state" else -1
        initial = {"cached": 100, "state": -1, "question": state}[kind]
        state = final if kind == "state" else state
        segments.append(Segment(row, length, row, initial_slot=initial, final_slot=final))
        row += length
    return segments, row


@given(segment_lists, st.integers(1, 7))
def test_every_row_is_in_one_tile_one_chunk_and_one_piece(kinds, step_chunks):
    segments, rows = build(kinds)
    plan = plan_recurrence(segments, device="cpu", step_chunks=step_chunks)
    for table in (plan.tiles, plan.chunks, plan.pieces):
        covered = sorted(r for row, count, *_ in table.tolist() for r in range(row, row + count))
        assert covered == list(range(rows))
    assert all(0 < count <= TILE for _, count, *_ in plan.tiles.tolist())


@given(segment_lists, st.integers(1, 7))
def test_a_piece_finds_its_own_chunks_in_its_step(kinds, step_chunks):
    segments, _ = build(kinds)
    plan = plan_recurrence(segments, device="cpu", step_chunks=step_chunks)
    chunks, pieces = plan.chunks.tolist(), plan.pieces.tolist()
    for step in plan.steps:
        assert step.chunks <= step_chunks
        for first, count in step.phases:
            for row, length, chunk, _, _ in pieces[first : first + count]:
                mine = chunks[step.first_chunk + chunk :][: -(-length // CHUNK)]
                assert [start for start, _ in mine] == list(range(row, row + length, CHUNK))
                assert chunk + len(mine) <= step.chunks


@given(segment_lists, st.integers(1, 7))
def test_a_follower_runs_after_its_root_is_complete(kinds, step_chunks):
    segments, _ = build(kinds)
    plan = plan_recurrence(segments, device="cpu", step_chunks=step_chunks)
    written: set[int] = set()
    filled = {s.final_slot for s in segments} - {-1}
    for step in plan.steps:
        for first, count in step.phases:
            launch = plan.pieces.tolist()[first : first + count]
            assert {initial for *_, initial, _ in launch} & filled <= written
            carried = [(i, piece[3]) for i, piece in enumerate(launch) if piece[3] < -1]
            assert all(carry in written for _, carry in carried)
            for i, carry in carried:  # inside one launch nobody else may write what a piece reads
                assert all(piece[4] != carry for j, piece in enumerate(launch) if j != i)
            written |= {final for *_, final in launch}


def test_bucket_too_small_is_refused():
    segments = [Segment(0, 65, 0)]
    needed = recurrence_sizes(segments)
    assert plan_recurrence(segments, device="cpu", sizes=needed).tiles.shape[0] == needed.tiles
    for name in needed._fields[:3]:
        small: RecurrenceSizes = needed._replace(**{name: getattr(needed, name) - 1})
        with pytest.raises(ValueError, match=name):
            plan_recurrence(segments, device="cpu", sizes=small)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(0, 0, 0)], "at least one row"),
        ([Segment(0, 1, 0, final_slot=1), Segment(1, 1, 1, final_slot=1)], "two segments fill slot 1"),
        ([Segment(0, 1, 0, initial_slot=1, final_slot=1)], "both reads and fills slot 1"),
        (
            [
                Segment(0, 1, 0, final_slot=1),
                Segment(1, 1, 1, initial_slot=1, final_slot=2),
                Segment(2, 1, 2, initial_slot=2),
            ],
            "itself waits",
        ),
    ],
)
def test_impossible_passes_are_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        plan_recurrence(segments, device="cpu")
