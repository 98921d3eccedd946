"""The rows of a pass: a partition into segments, places of their own, positions of each row's own prompt."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from d3serve.model.plan import QuestionRows, StatePlace, StateRows, plan_rows

lengths = st.integers(1, 40)


@st.composite
def turns(draw):
    """States placed one after the other, some of them cached, and questions about them or about nothing."""
    start, places = 0, []
    for slot, length in enumerate(draw(st.lists(lengths, max_size=5))):
        start += draw(st.integers(0, 3))
        places.append(StatePlace(start, length, slot))
        start += length
    fresh = [place for place in places if draw(st.booleans())]
    asked = draw(st.lists(st.tuples(lengths, st.sampled_from([*places, None])), min_size=1, max_size=8))
    states = [StateRows(np.full(p.length, p.slot, dtype=np.int32), p) for p in fresh]
    questions = [QuestionRows(np.full(n, 100 + i, dtype=np.int32), p) for i, (n, p) in enumerate(asked)]
    return states, questions, start + draw(st.integers(0, 5))


@settings(deadline=None)
@given(turns())
def test_a_planned_pass(turn):
    states, questions, scratch = turn
    rows = plan_rows(*turn)
    total = sum(len(each.tokens) for each in (*states, *questions))
    assert len(rows.tokens) == len(rows.positions) == len(rows.slot_mapping) == total
    covered = [row for s in rows.segments for row in range(s.start, s.start + s.length)]
    assert covered == list(range(total)), "segments cover every row once, in order"
    assert len(set(rows.slot_mapping)) == total, "no two rows write one place"
    assert rows.state_rows == sum(len(each.tokens) for each in states)
    assert all(place < scratch for place in rows.slot_mapping[: rows.state_rows])
    assert list(rows.slot_mapping[rows.state_rows :]) == list(
        range(scratch, scratch + total - rows.state_rows)
    )
    for segment, each in zip(rows.segments, (*states, *questions), strict=True):
        inside = slice(segment.start, segment.start + segment.length)
        assert list(rows.tokens[inside]) == list(each.tokens)
        assert list(rows.slot_mapping[inside]) == list(
            range(segment.own_start, segment.own_start + segment.length)
        )
        assert list(rows.positions[inside]) == list(
            range(segment.prefix_length, segment.prefix_length + segment.length)
        )


@settings(deadline=None)
@given(turns())
def test_segments_of_a_planned_pass(turn):
    states, questions, _ = turn
    rows = plan_rows(*turn)
    for segment, state in zip(rows.segments, states, strict=False):
        assert (segment.initial_slot, segment.final_slot) == (-1, state.place.slot)
        assert segment.prefix_length == 0
    for segment, question, last in zip(
        rows.segments[len(states) :], questions, rows.readout_rows, strict=True
    ):
        assert last == segment.start + segment.length - 1
        assert segment.final_slot == -1, "a question never writes a slot"
        place = question.state
        seen = (segment.initial_slot, segment.prefix_start, segment.prefix_length)
        assert seen == ((place.slot, place.start, place.length) if place else (-1, 0, 0))
    shifted = [s._replace(start=s.start + rows.state_rows) for s in rows.question_segments]
    assert shifted == list(rows.segments[len(states) :])
