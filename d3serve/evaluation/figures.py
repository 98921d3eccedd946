"""How good answers are, in figures: of each question, and of all together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import average_precision_score, cohen_kappa_score, confusion_matrix, roc_auc_score

from d3serve.evaluation.judged import Judged

BINS: Final = 15  # of equal width, as in Guo et al. (2017) and the checkpoint's model card
CONFIDENCE: Final = 0.95
DRAWS: Final = 1000
SEED: Final = 0
ALL: Final = "all questions"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Share:
    """How many of how many, and between which shares the true one lies (Wilson, 95 %)."""

    part: int
    whole: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bin:
    """Answers of about one probability: how sure they were on average, and how often that came true."""

    said: float
    came_true: Share


@dataclass(frozen=True)
class Calibration:
    """Whether probabilities mean what they say.

    `error` is the expected calibration error (ECE); answers as sure as these which mean exactly what they say would
    stay below `by_chance` 19 times in 20, so a smaller error is no finding.
    """

    error: float
    by_chance: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Confusion:
    """How often each option (column) was the answer where each (row) was true; `counts` is [truth][answer]."""

    options: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Separation:
    """How well the probability of yes tells yes from no, whatever the threshold; None with one class alone."""

    yes: int
    roc_auc: float | None
    average_precision: float | None


@dataclass(frozen=True)
class Levels:
    """How far expected levels are from the true ones, in levels."""

    mean_absolute_error: float
    root_mean_squared_error: float
    bias: float
    within_one: Share
    quadratic_kappa: float | None
    error_of_median: float


@dataclass(frozen=True)
class Figures:
    """What can be said of the answers to one question, or to all of them."""

    name: str
    kind: str
    accuracy: Share
    commonest: float
    log_loss: float
    impossible: int
    brier: float
    calibration: Calibration
    confusion: Confusion | None = None
    separation: Separation | None = None
    levels: Levels | None = None


def by_question(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """The answers to each question, in the order of their first."""
    groups: dict[str, list[Judged]] = {}
    for each in judged:
        groups.setdefault(each.question, []).append(each)
    return groups


def share(part: int, whole: int) -> Share:
    """A share with its interval by Wilson's formula."""
    interval = binomtest(part, whole).proportion_ci(CONFIDENCE, method="wilson")
    return Share(part, whole, part / whole, float(interval.low), float(interval.high))


def figures(judged: Sequence[Judged]) -> list[Figures]:
    """Of all questions together, if there are several, and of each."""
    groups = by_question(judged)
    rows = [_figures(name, group) for name, group in groups.items()]
    return rows if len(rows) == 1 else [_overall(judged), *rows]


def _overall(judged: Sequence[Judged]) -> Figures:
    return Figures(name=ALL, kind="all", **_common(judged), calibration=_calibration(*_surest(judged)))


def _figures(name: str, judged: Sequence[Judged]) -> Figures:
    kinds = {each.kind for each in judged}
    kind = kinds.pop() if len(kinds) == 1 else "mixed"
    said = _yes(judged) if kind == "noul" else _surest(judged)
    return Figures(
        name=name, kind=kind, **_common(judged), calibration=_calibration(*said), confusion=confusion(judged),
        separation=_separation(judged) if kind == "noul" else None,
        levels=_levels(judged) if kind == "score" else None,
    )  # fmt: skip


def _common(judged: Sequence[Judged]) -> dict[str, Any]:
    right = sum(each.is_right for each in judged)
    truths = Counter((each.question, each.options[each.truth]) for each in judged)
    best: dict[str, int] = {}
    for (question, _), count in truths.items():
        best[question] = max(best.get(question, 0), count)
    return {
        "accuracy": share(right, len(judged)),
        "commonest": sum(best.values()) / len(judged),
        "log_loss": float(np.mean([each.loss for each in judged])),
        "impossible": sum(each.probabilities[each.truth] <= 0 for each in judged),
        "brier": float(np.mean([each.squared for each in judged])),
    }


def _surest(judged: Sequence[Judged]) -> tuple[Floats, NDArray[np.bool_]]:
    """How sure each decision was, and whether it is right."""
    said = np.array([each.probabilities[each.decision] for each in judged], dtype=float)
    return said, np.array([each.is_right for each in judged])


def _yes(judged: Sequence[Judged]) -> tuple[Floats, NDArray[np.bool_]]:
    """Each probability of yes, and whether yes is true."""
    said = np.array([each.probabilities[1] for each in judged], dtype=float)
    return said, np.array([each.truth == 1 for each in judged])


def _calibration(said: Floats, came_true: NDArray[np.bool_]) -> Calibration:
    places = np.minimum((said * BINS).astype(int), BINS - 1)
    generator = np.random.default_rng(SEED)
    drawn = np.array([
        _calibration_error(places, said, generator.random(len(said)) < said) for _ in range(DRAWS)
    ])  # fmt: skip
    bins = tuple(_bin(said[places == place], came_true[places == place]) for place in np.unique(places))
    error = _calibration_error(places, said, came_true)
    return Calibration(error, float(np.quantile(drawn, CONFIDENCE)), bins)


def _bin(said: Floats, came_true: NDArray[np.bool_]) -> Bin:
    return Bin(float(said.mean()), share(int(came_true.sum()), len(came_true)))


def _calibration_error(places: NDArray[np.int_], said: Floats, came_true: NDArray[np.bool_]) -> float:
    return float(np.abs(np.bincount(places, came_true - said, minlength=BINS)).sum() / len(said))


def confusion(judged: Sequence[Judged]) -> Confusion:
    """Which options were answered where which are true. Options that are neither in any case have no row."""
    known = dict.fromkeys(option for each in judged for option in each.options)
    truths = [each.options[each.truth] for each in judged]
    answers = [each.options[each.decision] for each in judged]
    met = {*truths, *answers}
    options = [option for option in known if option in met]
    places = {option: place for place, option in enumerate(options)}
    if len(options) == 1:  # of which scikit-learn makes no matrix
        return Confusion(tuple(options), ((len(judged),),))
    counts = confusion_matrix(
        [places[truth] for truth in truths],
        [places[answer] for answer in answers],
        labels=range(len(options)),
    )
    return Confusion(tuple(options), tuple(tuple(map(int, row)) for row in counts))


def _separation(judged: Sequence[Judged]) -> Separation:
    said, truths = _yes(judged)
    yes = int(truths.sum())
    if yes in {0, len(truths)}:
        return Separation(yes, None, None)
    return Separation(yes, float(roc_auc_score(truths, said)), float(average_precision_score(truths, said)))


def _levels(judged: Sequence[Judged]) -> Levels:
    truths = np.array([each.truth for each in judged])
    away = np.array([each.level for each in judged]) - truths
    decisions = np.array([each.decision for each in judged])
    near = int((np.abs(decisions - truths) <= 1).sum())
    same_scale = len({each.options for each in judged}) == 1
    kappa = None
    if same_scale and len({*truths.tolist(), *decisions.tolist()}) > 1:
        kappa = float(cohen_kappa_score(truths, decisions, weights="quadratic"))
    return Levels(
        mean_absolute_error=float(np.abs(away).mean()),
        root_mean_squared_error=float(np.sqrt((away**2).mean())),
        bias=float(away.mean()),
        within_one=share(near, len(judged)),
        quadratic_kappa=kappa,
        error_of_median=float(np.abs(np.median(truths) - truths).mean()),
    )


def worst(judged: Sequence[Judged], most: int) -> list[Judged]:
    """The answers that gave the truth the least probability: where a wording or a label is at fault."""
    wrong = [each for each in judged if not each.is_right]
    return sorted(wrong, key=lambda each: each.probabilities[each.truth])[:most]


def swaps(found: Confusion, most: int) -> list[tuple[str, str, int]]:
    """The commonest mistakes: truth, answer and how often."""
    mistakes: Mapping[tuple[str, str], int] = {
        (truth, answer): count
        for truth, row in zip(found.options, found.counts, strict=True)
        for answer, count in zip(found.options, row, strict=True)
        if count and truth != answer
    }
    return [(*pair, count) for pair, count in Counter(mistakes).most_common(most)]
