"""The held-out sample of the demo checkpoint: reading it, and scoring wire answers against its truths."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).parents[1] / "tests" / "demo" / "heldout.jsonl"
BINS = 15


@dataclass(frozen=True)
class Case:
    """One package: its state, wire questions by name, and their truths."""

    package: str
    state: Any
    questions: dict[str, dict[str, Any]]
    truths: dict[str, str | bool | int]


@dataclass(frozen=True)
class Scored:
    """One answer: probabilities in the order of the options, and which option is true."""

    name: str
    probabilities: tuple[float, ...]
    truth: int

    @property
    def family(self) -> str:
        """What kind of question it is: section, noul, size, …"""
        return self.name.partition("-")[2]

    @property
    def decision(self) -> int:
        """The first most probable option."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)


def read_cases(limit: int | None = None) -> list[Case]:
    """The first `limit` packages of the sample."""
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()[1:]
    return [Case(**json.loads(line)) for line in lines[:limit]]


def read_head() -> dict[str, Any]:
    """Source, licence, and how simpler models do on the sample's section questions."""
    head: dict[str, Any] = json.loads(SAMPLE.read_text(encoding="utf-8").splitlines()[0])
    return head


def score(case: Case, answers: Mapping[str, Mapping[str, Any]]) -> list[Scored]:
    """Wire answers to one package's questions against their truths."""
    return [Scored(name, _probabilities(answers[name]), _truth(case, name)) for name in case.questions]


def _probabilities(answer: Mapping[str, Any]) -> tuple[float, ...]:
    if answer["type"] == "noul":
        return (1.0 - answer["noul"], answer["noul"])
    return tuple(answer["probabilities"].values())


def _truth(case: Case, name: str) -> int:
    truth = case.truths[name]
    return list(case.questions[name]["criteria"]).index(truth) if isinstance(truth, str) else int(truth)


def accuracy(scored: Sequence[Scored]) -> float:
    """Share of decisions that are true."""
    return sum(each.decision == each.truth for each in scored) / len(scored)


def nll(scored: Sequence[Scored]) -> float:
    """Mean negative log-likelihood of the truths, in nats."""
    return -sum(math.log(max(each.probabilities[each.truth], 1e-12)) for each in scored) / len(scored)


def calibration_error(scored: Sequence[Scored]) -> float:
    """Expected calibration error of the decision over 15 bins of equal width (Guo et al., 2017)."""
    bins: dict[int, list[float]] = {}
    for each in scored:
        top = each.probabilities[each.decision]
        bins.setdefault(min(int(top * BINS), BINS - 1), []).append((each.decision == each.truth) - top)
    return sum(abs(sum(gaps)) for gaps in bins.values()) / len(scored)


def by_family(scored: Iterable[Scored]) -> dict[str, list[Scored]]:
    """Answers grouped by family, all of them first."""
    every = list(scored)
    groups = {"all": every}
    for each in every:
        groups.setdefault(each.family, []).append(each)
    return groups
