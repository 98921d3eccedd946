"""Positions of a prompt with media: three axes, by time, row and column, in which text moves alike.

An image, or one pair of a video's frames, begins at one position: its tokens keep that time and are told apart by
row and column. What follows begins where its longer side ends. So positions fall behind the count of tokens, and the
difference, `delta`, holds for all that comes after the media.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Span:
    """The tokens of one image or frame pair: where they begin, and their rows and columns."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """Where they end."""
        return self.start + self.rows * self.columns

    @property
    def delta(self) -> int:
        """How far positions fall behind the count of tokens; never above 0."""
        return max(self.rows, self.columns) - self.rows * self.columns


def media_positions(length: int, spans: Sequence[Span]) -> NDArray[np.int64]:
    """Positions [3, length] of a block that begins its prompt, with media at `spans`, in order."""
    positions = np.tile(np.arange(length), (3, 1))
    for span in spans:
        first = positions[0, span.start]
        positions[0, span.start : span.stop] = first
        positions[1, span.start : span.stop] = first + np.repeat(np.arange(span.rows), span.columns)
        positions[2, span.start : span.stop] = first + np.tile(np.arange(span.columns), span.rows)
        positions[:, span.stop :] += span.delta
    return positions


def axes(sections: Sequence[int], frequencies: int) -> NDArray[np.int64]:
    """Which axis turns each rotary frequency: time, row, column in turn while their sections last, then time."""
    turned = np.zeros(frequencies, dtype=np.int64)
    for axis in (1, 2):
        turned[axis : 3 * sections[axis] : 3] = axis
    return turned
