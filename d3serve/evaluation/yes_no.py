"""Where to put the threshold of a yes/no question: at a precision, at a recall, or at the least cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from d3serve.errors import InvalidRequest
from d3serve.evaluation.figures import Share, share
from d3serve.evaluation.judged import Judged

SHARE: Final = 0.95  # what precision and recall are looked for if nobody says


@dataclass(frozen=True)
class Wanted:
    """What a threshold is chosen for; a cost is what a wrong yes and a missed yes cost."""

    precision: float = SHARE
    recall: float = SHARE
    wrong_yes: float = 1.0
    missed_yes: float = 1.0


@dataclass(frozen=True)
class Threshold:
    """Yes from this probability on, and what that gives on the cases; no threshold where none does what is wanted."""

    wanted: str
    at: float | None
    precision: Share | None = None
    recall: Share | None = None
    wrong_yes: int = 0
    missed_yes: int = 0
    cost: float = 0.0


def read_cost(text: str) -> tuple[float, float]:
    """The two costs in `5:1`: of a wrong yes, and of a missed one.

    Raises:
        InvalidRequest: it is not two numbers from 0, of which one is more.
    """
    try:
        wrong, missed = (float(part) for part in text.split(":"))
    except ValueError:
        wrong = missed = -1.0
    if not (0 <= wrong < np.inf and 0 <= missed < np.inf and wrong + missed > 0):
        raise InvalidRequest(
            f"--cost {text!r}: write what a wrong yes and a missed yes cost, as in 5:1", field="cost"
        )
    return wrong, missed


@dataclass(frozen=True)
class Sweep:
    """What every threshold that matters would give, lowest first: those at a probability that was answered."""

    at: NDArray[np.float64]
    answered_yes: NDArray[np.int_]
    right_yes: NDArray[np.int_]
    yes: int

    @property
    def precision(self) -> NDArray[np.float64]:
        """Of the answers yes, the share that is right."""
        return self.right_yes / self.answered_yes

    @property
    def recall(self) -> NDArray[np.float64]:
        """Of what is yes, the share that was answered so."""
        return self.right_yes / self.yes


def sweep(judged: Sequence[Judged]) -> Sweep | None:
    """All thresholds, or None where the labels are all yes or all no: then nothing can be chosen."""
    said = np.array([each.probabilities[1] for each in judged], dtype=float)
    truths = np.array([each.truth for each in judged])
    yes = int(truths.sum())
    if yes in {0, len(truths)}:
        return None
    order = np.argsort(said, kind="stable")
    at, first = np.unique(said[order], return_index=True)
    right = yes - np.concatenate(([0], np.cumsum(truths[order])))[first]
    return Sweep(at, len(said) - first, right, yes)


def thresholds(judged: Sequence[Judged], wanted: Wanted) -> list[Threshold]:
    """The thresholds for what is wanted, and that of one half beside them; none where labels have one class alone."""
    swept = sweep(judged)
    if swept is None:
        return []
    precise = np.flatnonzero(swept.precision >= wanted.precision)
    recalling = np.flatnonzero(swept.recall >= wanted.recall)
    cost = (swept.answered_yes - swept.right_yes) * wanted.wrong_yes + (
        swept.yes - swept.right_yes
    ) * wanted.missed_yes
    never = swept.yes * wanted.missed_yes  # no answer is ever yes
    cheapest = int(np.argmin(cost)) if cost.min() <= never else None
    half = int(np.searchsorted(swept.at, 0.5))
    chosen = [
        ("as answered", half if half < len(swept.at) else None),
        (f"precision {wanted.precision:g}", int(precise[np.argmax(swept.recall[precise])]) if len(precise) else None),
        (f"recall {wanted.recall:g}", int(recalling[np.argmax(swept.precision[recalling])])),
        (f"least cost {wanted.wrong_yes:g}:{wanted.missed_yes:g}", cheapest),
    ]  # fmt: skip
    return [_threshold(name, swept, place, wanted) for name, place in chosen]


def _threshold(name: str, swept: Sweep, place: int | None, wanted: Wanted) -> Threshold:
    if place is None:
        return Threshold(name, None)
    right, answered = int(swept.right_yes[place]), int(swept.answered_yes[place])
    wrong, missed = answered - right, swept.yes - right
    at = 0.5 if name == "as answered" else float(swept.at[place])
    return Threshold(
        name, at, share(right, answered), share(right, swept.yes), wrong, missed,
        wrong * wanted.wrong_yes + missed * wanted.missed_yes,
    )  # fmt: skip
