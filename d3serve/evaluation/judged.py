"""Labelled questions with their answers: what everything else is counted from."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from d3serve.errors import D3ServeError, InvalidRequest
from d3serve.evaluation.cases import Case, read_file, strict_object

SMALLEST: Final = 2.0**-52  # a truth given less than this counts as given this, as scikit-learn does it
EXCERPT: Final = 300  # characters of a state that a report shows


@dataclass(frozen=True)
class Judged:
    """An answer to a labelled question: the probabilities of its options, and which of them is true."""

    case: str
    digest: str
    question: str
    kind: str
    options: tuple[str, ...]
    probabilities: tuple[float, ...]
    truth: int
    excerpt: str = ""

    @property
    def decision(self) -> int:
        """The most probable option, the first of equals; yes from one half on."""
        if self.kind == "noul":
            return int(self.probabilities[1] >= 0.5)
        return max(range(len(self.options)), key=self.probabilities.__getitem__)

    @property
    def is_right(self) -> bool:
        """Whether that is the true one."""
        return self.decision == self.truth

    @property
    def loss(self) -> float:
        """Minus the logarithm of the probability that the truth was given, in nats."""
        return -math.log(max(self.probabilities[self.truth], SMALLEST))

    @property
    def squared(self) -> float:
        """Half the squared distance from the truth: the Brier score of this answer, 0 to 1."""
        away = (p - (place == self.truth) for place, p in enumerate(self.probabilities))
        return math.fsum(each * each for each in away) / 2

    @property
    def level(self) -> float:
        """The expected place among the options, counted from 0: what a score is answered with."""
        return math.fsum(place * p for place, p in enumerate(self.probabilities))


@dataclass(frozen=True)
class JudgedAnswers:
    """What is known of the cases: judged answers, the models that gave them, and why others have none."""

    judged: tuple[Judged, ...]
    models: tuple[str, ...]
    missing: tuple[str, ...] = ()


def read_results(path: Path) -> dict[str, Mapping[str, Any]]:
    """The answers that an evaluation kept in a file, by the digest of their case; of two, the one that succeeded.

    Raises:
        InvalidRequest: it cannot be read, or is no such file.
    """
    rows: dict[str, Mapping[str, Any]] = {}
    for place, text in enumerate(read_file(path).split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            row = strict_object(text, "the line")
            digest, status = row["custom_id"], row["status"]
        except (D3ServeError, KeyError):
            raise InvalidRequest(
                f"{path} line {place} is no result of `d3serve evaluate`", field="against"
            ) from None
        if digest not in rows or status == "succeeded":
            rows[digest] = row
    return rows


def judge(cases: Sequence[Case], results: Mapping[str, Mapping[str, Any]], source: str) -> JudgedAnswers:
    """The answers that results hold for the cases.

    Raises:
        InvalidRequest: an answer is not to the question that its case asks: the results are of other cases.
    """
    judged: list[Judged] = []
    missing: list[str] = []
    models: dict[str, None] = {}
    for case in cases:
        row = results.get(case.digest, {})
        result = row.get("result") if row.get("status") == "succeeded" else None
        if result is None:
            error = row.get("error") or {}
            missing.append(f"{case.name}: {error.get('code', row.get('status', 'not asked'))}")
            continue
        models[str(result["model"])] = None
        for name in case.labels:
            answer = result["answers"].get(name)
            if answer is not None and answer["type"] == "error":
                missing.append(f"{case.name}, {name}: {answer['error']['code']}")
                continue
            try:
                probabilities = tuple(_probabilities(case, name, answer))
            except (KeyError, TypeError, ValueError):
                raise InvalidRequest(
                    f"{source} has no answer to {name!r} of line {case.number}: it is of other cases",
                    field="against",
                ) from None
            judged.append(_judged(case, name, probabilities))
    return JudgedAnswers(tuple(judged), tuple(models), tuple(missing))


def _judged(case: Case, name: str, probabilities: tuple[float, ...]) -> Judged:
    return Judged(
        case=case.name, digest=case.digest, question=name, kind=case.questions[name]["type"],
        options=case.options[name], probabilities=probabilities, truth=case.labels[name],
        excerpt=case.excerpt(EXCERPT),
    )  # fmt: skip


def _probabilities(case: Case, name: str, answer: Mapping[str, Any]) -> Iterator[float]:
    kind, options = case.questions[name]["type"], case.options[name]
    if answer["type"] != kind:
        raise ValueError(kind)
    if kind == "noul":
        yield 1.0 - answer["noul"]
        yield answer["noul"]
        return
    told = answer["probabilities"]
    keys: Iterable[str] = options if kind == "choice" else map(str, range(len(options)))
    if len(told) != len(options):
        raise ValueError(name)
    for key in keys:
        yield told[key]
