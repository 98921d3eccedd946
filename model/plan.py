"""Which rows a pass has: placed states and questions to tokens, positions, pool rows and segments.

Rows stand as `[state A | state B | … | question A1 | A2 | B1 | …]`. Pure bookkeeping on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from d3serve.kernels.segments import Segment
from d3serve.model.media import Medium
from d3serve.model.media_prompt import PlacedMedia
from d3serve.model.prompt import Tokens


@dataclass(frozen=True)
class StatePlace:
    """Where a state's K/V rows and recurrent slot are, and what its media take off the positions behind it."""

    start: int
    length: int
    slot: int
    delta: int = 0


@dataclass(frozen=True)
class StateRows:
    """A state that this pass reads into its place."""

    tokens: Tokens
    place: StatePlace
    media: PlacedMedia | None = None


@dataclass(frozen=True)
class QuestionRows:
    """A question block; without a state it is a whole prompt, which shares nothing."""

    tokens: Tokens
    state: StatePlace | None
    media: PlacedMedia | None = None  # of a whole prompt


@dataclass(frozen=True, eq=False)
class MediumRows:
    """A distinct medium of a pass, and the rows that its features take: [places, pads]."""

    medium: Medium
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class PassRows:
    """A planned pass of T rows, the first `state_rows` of which are state rows."""

    tokens: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T], within the row's own prompt; [3, T] where the pass reads media
    slot_mapping: NDArray[np.int64]  # [T], the K/V pool row that each row writes
    segments: tuple[Segment, ...]
    state_rows: int
    readout_rows: NDArray[np.int64]  # [N], the last row of each question
    media: tuple[MediumRows, ...] = ()

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
    media: list[tuple[int, PlacedMedia]] = []  # with the row at which their prompt begins
    row = 0
    for state in states:
        start, length, slot = state.place.start, state.place.length, state.place.slot
        segments.append(Segment(row, length, start, final_slot=slot))
        positions.append(_positions(length, state.media))
        mapping.append(np.arange(start, start + length))
        tokens.append(state.tokens)
        media += [(row, state.media)] if state.media else []
        row += length
    state_rows, last_rows = row, []
    for question in questions:
        length, own_start = len(question.tokens), scratch_start + row - state_rows
        segment = Segment(row, length, own_start)
        if (place := question.state) is None:
            positions.append(_positions(length, question.media))
            media += [(row, question.media)] if question.media else []
        else:
            segment = segment._replace(
                prefix_start=place.start, prefix_length=place.length, initial_slot=place.slot
            )
            first = place.length + place.delta
            positions.append(np.arange(first, first + length))
        segments.append(segment)
        mapping.append(np.arange(own_start, own_start + length))
        tokens.append(question.tokens)
        row += length
        last_rows.append(row - 1)
    return PassRows(
        tokens=np.concatenate(tokens).astype(np.int64),
        positions=_joined(positions).astype(np.int64),
        slot_mapping=np.concatenate(mapping).astype(np.int64),
        segments=tuple(segments),
        state_rows=state_rows,
        readout_rows=np.array(last_rows, dtype=np.int64),
        media=_distinct(media),
    )


def _positions(length: int, media: PlacedMedia | None) -> NDArray[np.int64]:
    """Positions of a block that begins its prompt: [length], or [3, length] with media."""
    return np.arange(length) if media is None else media.positions(length)


def _joined(positions: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Positions of all blocks: text moves alike on all axes, which are written out only beside media."""
    if all(each.ndim == 1 for each in positions):
        return np.concatenate(positions)
    return np.concatenate([np.broadcast_to(each, (3, each.shape[-1])) for each in positions], axis=1)


def _distinct(placed: Sequence[tuple[int, PlacedMedia]]) -> tuple[MediumRows, ...]:
    """Each medium once, however many blocks show it."""
    media: dict[str, Medium] = {}
    rows: dict[str, list[NDArray[np.int64]]] = {}
    for first, block in placed:
        for medium, spans in zip(block.media, block.spans, strict=True):
            media[medium.identity] = medium
            runs = [np.arange(span.start, span.stop) for span in spans]
            rows.setdefault(medium.identity, []).append(first + np.concatenate(runs))
    return tuple(MediumRows(media[each], np.stack(rows[each])) for each in media)
