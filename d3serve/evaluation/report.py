"""An evaluation as a whole: everything that the terminal, the page and the JSON file say comes from it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from d3serve.errors import D3ServeError, InvalidRequest
from d3serve.evaluation.cases import read_file, strict_object
from d3serve.evaluation.figures import Figures, by_question, figures, worst
from d3serve.evaluation.judged import Judged, JudgedAnswers
from d3serve.evaluation.paired import Comparison, compare, verdict
from d3serve.evaluation.yes_no import Threshold, Wanted, thresholds

WORST: Final = 20
FORMAT: Final = "d3serve.evaluation"  # what tells our reports from other JSON


@dataclass(frozen=True)
class Against:
    """A comparison: what the two sides are called, each question, and what is to be concluded from all."""

    first: str
    second: str
    rows: tuple[Comparison, ...]
    verdict: str
    models: tuple[str, ...]
    missing: int


@dataclass(frozen=True)
class Report:
    """An evaluation: of which cases, by whom they were answered, how well."""

    cases: str
    number: int
    answers: JudgedAnswers
    figures: tuple[Figures, ...]
    thresholds: Mapping[str, Sequence[Threshold]]
    worst: tuple[Judged, ...]
    against: Against | None = None
    wanted: Wanted = field(default_factory=Wanted)

    def to_json(self) -> str:
        """All of it with every answer, such that a later evaluation can be compared with it."""
        told = {"format": FORMAT, **_plain(asdict(self))}
        for each in told["answers"]["judged"]:
            del each["excerpt"]
        return json.dumps(told, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def evaluate(
    cases: str, number: int, answers: JudgedAnswers, wanted: Wanted, against: Against | None = None
) -> Report:
    """Everything that can be said about the answers.

    Raises:
        InvalidRequest: there are none.
    """
    if not answers.judged:
        raise InvalidRequest(f"no case has an answer: {'; '.join(answers.missing[:3])}", field="cases")
    asked = by_question(answers.judged)
    return Report(
        cases=cases,
        number=number,
        answers=answers,
        figures=tuple(figures(answers.judged)),
        thresholds={
            name: thresholds(group, wanted)
            for name, group in asked.items()
            if all(each.kind == "noul" for each in group)
        },
        worst=tuple(worst(answers.judged, WORST)),
        against=against,
        wanted=wanted,
    )


def set_against(first: str, one: JudgedAnswers, second: str, other: JudgedAnswers) -> Against:
    """The comparison of two sets of answers.

    Raises:
        InvalidRequest: they have nothing in common.
    """
    rows = compare(one.judged, other.judged)
    said = verdict(rows[0], first, second)
    return Against(first, second, tuple(rows), said, other.models, len(other.missing))


def read_report(path: Path) -> JudgedAnswers | None:
    """The answers in a report that an earlier evaluation wrote; None if the file is no report.

    Raises:
        InvalidRequest: it cannot be read, or is a report that lacks what it needs.
    """
    try:
        told = strict_object(read_file(path), str(path))
    except InvalidRequest:
        raise
    except D3ServeError:
        return None
    if told.get("format") != FORMAT:
        return None
    try:
        kept = told["answers"]
        judged = tuple(
            Judged(
                each["case"], each["digest"], each["question"], each["kind"], tuple(each["options"]),
                tuple(map(float, each["probabilities"])), int(each["truth"]),
            )
            for each in kept["judged"]
        )  # fmt: skip
        return JudgedAnswers(judged, tuple(kept["models"]), tuple(kept["missing"]))
    except (KeyError, TypeError, ValueError):
        raise InvalidRequest(f"{path} is a report that lacks its answers", field="against") from None


def _plain(value: Any) -> Any:
    """As JSON has it: what is not finite is null."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
