"""Which rows a pass has: placed states and questions to tokens, positions, pool rows and segments.

Rows stand as `[state A | state B | … | question A1 | A2 | B1 | …]`. Pure bookkeeping on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from d3serve.kernels.segments import Segment
from d3serve.model.prompt import Tokens


@dataclass(frozen=True)
class StatePlace:
    """Where a state's K/V rows and recurrent slot are."""

    start: int
    length: int
    slot: int


@dataclass(frozen=True)
class StateRows:
    """A state that this pass reads into its place."""

    tokens: Tokens
    place: StatePlace


@dataclass(frozen=True)
class QuestionRows:
    """A question block; without a state it is a whole prompt, which shares nothing."""

    tokens: Tokens
    state: StatePlace | None


@dataclass(frozen=True)
class PassRows:
    """A planned pass of T rows, the first `state_rows` of which are state rows."""

    tokens: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T], within the row's own prompt
    slot_mapping: NDArray[np.int64]  # [T], the K/V pool row that each row writes
    segments: tuple[Segment, ...]
    state_rows: int
    readout_rows: NDArray[np.int64]  # [N], the last row of each question

    @property
    def question_segments(self) -> tuple[Segment, ...]:
        """The questions' segments, their rows counted from the first question row."""
        shift = self.state_rows
        return tuple(s._replace(start=s.start - shift) for s in self.segments if s.start >= shift)


def plan_rows(states: Sequence[StateRows], questions: Sequence[QuestionRows], scratch_start: int) -> PassRows:
    """Lay out one pass; question rows write their K/V to the scratch range that begins at `scratch_start`.

    Args:
        states: the states to read, each into its own place.
        questions: at least one; their states are cached, or among `states`.
        scratch_start: first pool row of a free range as long as all question blocks together.
    """
    tokens, positions, mapping, segments = [], [], [], []
    row = 0
    for state in states:
        start, length, slot = state.place.start, state.place.length, state.place.slot
        segments.append(Segment(row, length, start, final_slot=slot))
        positions.append(np.arange(length))
        mapping.append(np.arange(start, start + length))
        tokens.append(state.tokens)
        row += length
    state_rows, last_rows = row, []
    for question in questions:
        length, own_start = len(question.tokens), scratch_start + row - state_rows
        seen, segment = 0, Segment(row, length, own_start)
        if (place := question.state) is not None:
            seen = place.length
            segment = segment._replace(
                prefix_start=place.start, prefix_length=place.length, initial_slot=place.slot
            )
        segments.append(segment)
        positions.append(np.arange(seen, seen + length))
        mapping.append(np.arange(own_start, own_start + length))
        tokens.append(question.tokens)
        row += length
        last_rows.append(row - 1)
    return PassRows(
        tokens=np.concatenate(tokens).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        slot_mapping=np.concatenate(mapping).astype(np.int64),
        segments=tuple(segments),
        state_rows=state_rows,
        readout_rows=np.array(last_rows, dtype=np.int64),
    )
