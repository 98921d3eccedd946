"""Which of two sets of answers to the same cases is better, said only if the cases can tell."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, bootstrap, false_discovery_control, permutation_test

from d3serve.errors import InvalidRequest
from d3serve.evaluation.figures import ALL, CONFIDENCE, SEED, by_question
from d3serve.evaluation.judged import Judged

SIGNIFICANT: Final = 0.05
RESAMPLES: Final = 9_999
FEWEST: Final = 999
ALL_CELLS: Final = 50_000_000  # of all resamples of many cases, which then need fewer: some seconds
CELLS: Final = 2_000_000  # of a table of resamples: 16 MB
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """What the second has more than the first, on average over cases; `p` is how likely chance alone gives as much."""

    first: float
    second: float
    value: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Comparison:
    """Two sets of answers to the same labelled questions; `first_only` counts what the first alone has right."""

    name: str
    cases: int
    answers: int
    first_only: int
    second_only: int
    accuracy: Difference
    log_loss: Difference

    @property
    def better_accuracy(self) -> int:
        """1: the first is right more often; 2: the second; 0: the cases cannot tell."""
        return _which(self.accuracy)

    @property
    def better_log_loss(self) -> int:
        """Whose probabilities are better, in the same numbers."""
        difference = self.log_loss
        return {1: 2, 2: 1, 0: 0}[_which(difference)]


def _which(difference: Difference) -> int:
    if difference.p >= SIGNIFICANT or difference.value == 0:
        return 0
    return 2 if difference.value > 0 else 1


def compare(first: Sequence[Judged], second: Sequence[Judged]) -> list[Comparison]:
    """All questions together, if there are several, and each question.

    Accuracy of a question is tested by McNemar's exact test; of all questions, and log loss, by permuting which
    answers are whose, case by case, since answers about one case are no independent ones. The p values of several
    questions are adjusted for their number (Benjamini and Hochberg).

    Raises:
        InvalidRequest: they have no labelled question of a case in common.
    """
    known = {(each.digest, each.question): each for each in second}
    pairs = [(one, known[one.digest, one.question]) for one in first if (one.digest, one.question) in known]
    if not pairs:
        raise InvalidRequest("the two have no labelled question of a case in common", field="against")
    groups = by_question([one for one, _ in pairs])
    rows = [_compared(name, [pair for pair in pairs if pair[0].question == name]) for name in groups]
    if len(rows) == 1:
        return rows
    adjusted = zip(
        rows,
        false_discovery_control([row.accuracy.p for row in rows]),
        false_discovery_control([row.log_loss.p for row in rows]),
        strict=True,
    )
    return [_compared(ALL, pairs), *(_with_p(row, float(a), float(b)) for row, a, b in adjusted)]


def _with_p(row: Comparison, accuracy: float, log_loss: float) -> Comparison:
    return replace(
        row, accuracy=replace(row.accuracy, p=accuracy), log_loss=replace(row.log_loss, p=log_loss)
    )


def _compared(name: str, pairs: Sequence[tuple[Judged, Judged]]) -> Comparison:
    first_only = sum(one.is_right and not other.is_right for one, other in pairs)
    second_only = sum(other.is_right and not one.is_right for one, other in pairs)
    cases = [one.digest for one, _ in pairs]
    right = _by_case(cases, [(one.is_right, other.is_right) for one, other in pairs])
    losses = _by_case(cases, [(one.loss, other.loss) for one, other in pairs])
    one_each = len(right) == len(pairs)
    return Comparison(
        name, len(right), len(pairs), first_only, second_only,
        _difference(right, mcnemar(first_only, second_only) if one_each else None),
        _difference(losses),
    )  # fmt: skip


def mcnemar(first_only: int, second_only: int) -> float:
    """How likely two equally good sets of answers differ as unevenly: McNemar's exact test."""
    whole = first_only + second_only
    return float(binomtest(first_only, whole).pvalue) if whole else 1.0


def _by_case(cases: Sequence[str], values: Sequence[tuple[float, float]]) -> Floats:
    """The mean of both values over the answers of each case: [cases, 2]."""
    _, places, counts = np.unique(cases, return_inverse=True, return_counts=True)
    columns = np.array(values, dtype=float).T
    return np.stack([np.bincount(places, column) / counts for column in columns], axis=1)


def _difference(values: Floats, p: float | None = None) -> Difference:
    first, second = values.T
    away = second - first
    low, high = _interval(away)
    return Difference(
        float(first.mean()), float(second.mean()), float(away.mean()), low, high,
        _permuted(first, second) if p is None else p,
    )  # fmt: skip


def _interval(away: Floats) -> tuple[float, float]:
    """Between which differences the true one lies, by a bootstrap over cases."""
    if len(away) < 2 or np.ptp(away) == 0:
        return (
            (float(away.mean()),) * 2
            if np.ptp(away) == 0 and len(away) > 1
            else (float("-inf"), float("inf"))
        )
    found: Any = bootstrap(
        (away,), np.mean, confidence_level=CONFIDENCE, n_resamples=_resamples(len(away)), method="percentile",
        batch=max(1, CELLS // len(away)), rng=np.random.default_rng(SEED),
    )  # fmt: skip
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _resamples(cases: int) -> int:
    return max(FEWEST, min(RESAMPLES, ALL_CELLS // cases))


def _permuted(first: Floats, second: Floats) -> float:
    if not np.any(first != second):
        return 1.0
    if len(first) < 2:
        return 1.0  # one case tells nothing
    tested: Any = permutation_test(
        (first, second), lambda x, y, axis: np.mean(y - x, axis=axis), permutation_type="samples",
        n_resamples=_resamples(len(first)), batch=max(1, CELLS // len(first)), vectorized=True,
        rng=np.random.default_rng(SEED),
    )  # fmt: skip
    return float(tested.pvalue)


def verdict(row: Comparison, first: str, second: str) -> str:
    """Which is better, in a sentence."""
    accuracy, loss = row.better_accuracy, row.better_log_loss
    names = {1: first, 2: second}
    if accuracy and loss and accuracy != loss:
        return f"mixed: {names[accuracy]} is right more often, {names[loss]} has the better probabilities"
    if accuracy:
        return f"{names[accuracy]} is better: it is right more often" + (
            ", and its probabilities are better" if loss else ""
        )
    if loss:
        return f"{names[loss]} has the better probabilities; which is right more often cannot be told"
    if not row.first_only + row.second_only and row.log_loss.value == 0:
        return "no difference: both give the same answers"
    return "cannot be told apart"
