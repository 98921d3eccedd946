"""Questions as Python says them, and answers as Python reads them; both are the HTTP API's JSON on the wire."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class YesNo:
    """Yes or no, answered with the probability of yes; `yes` and `no` may say what each means."""

    instructions: Any = None
    yes: Any = None
    no: Any = None

    def to_json(self) -> dict[str, Any]:
        """The question as the HTTP API has it."""
        sides = {name: told for name, told in (("true", self.yes), ("false", self.no)) if told is not None}
        return _without_none({"type": "noul", "instructions": self.instructions, "criteria": sides or None})


@dataclass(frozen=True)
class Choice:
    """One of 2 to 255 options: their names, or a mapping of names to descriptions (or None)."""

    instructions: Any
    options: Iterable[str] | Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The question as the HTTP API has it."""
        named = self.options if isinstance(self.options, Mapping) else dict.fromkeys(self.options)
        told = _without_none({"type": "choice", "instructions": self.instructions})
        return {**told, "criteria": dict(named)}


@dataclass(frozen=True)
class Score:
    """A place on a scale of 2 to 10 levels, lowest first."""

    instructions: Any
    levels: Iterable[Any]

    def to_json(self) -> dict[str, Any]:
        """The question as the HTTP API has it."""
        told = _without_none({"type": "score", "instructions": self.instructions})
        return {**told, "criteria": list(self.levels)}


Question = YesNo | Choice | Score | Mapping[str, Any]
Questions = Mapping[str, Question]


def questions_json(questions: Any) -> Any:
    """Questions by name as the HTTP API has them; what is none of ours stays as it is, for the server to judge."""
    if not isinstance(questions, Mapping):
        return questions
    ours = YesNo | Choice | Score
    return {name: asked.to_json() if isinstance(asked, ours) else asked for name, asked in questions.items()}


def _without_none(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if value is not None}


# --- answers ---------------------------------------------------------------------------------------


class AnyAnswer(dict[str, Any]):
    """An answer: the object of the HTTP API, a dict, and what it says by name."""

    @property
    def type(self) -> str:
        """Which kind of answer it is: `noul`, `choice`, `score`, or `error`."""
        return str(self["type"])

    @property
    def failed(self) -> bool:
        """Whether an error stands in the answer's place, as `on_question_error: partial` lets it."""
        return self.type == "error"

    @property
    def confidence(self) -> float:
        """How far the distribution is from even, 0 to 1; not how often the model is right."""
        return float(self["confidence"])

    @property
    def probabilities(self) -> Mapping[str, float]:
        """The probability of each option by its name, or of each level by its number."""
        told: Mapping[str, float] = self["probabilities"]
        return told


class YesNoAnswer(AnyAnswer):
    """The answer to a `YesNo`."""

    @property
    def probability(self) -> float:
        """The probability of yes, 0 to 1."""
        return float(self["noul"])

    @property
    def yes(self) -> bool:
        """Whether yes is at least as probable as no."""
        return self.probability >= 0.5

    @property
    def probabilities(self) -> Mapping[str, float]:
        """Of `yes` and of `no`."""
        return {"yes": self.probability, "no": 1.0 - self.probability}


class ChosenAnswer(AnyAnswer):
    """The answer to a `Choice`."""

    @property
    def choice(self) -> str:
        """The name of the most probable option."""
        return str(self["choice"])

    @property
    def probability(self) -> float:
        """The probability of that option."""
        return self.probabilities[self.choice]


class ScoredAnswer(AnyAnswer):
    """The answer to a `Score`."""

    @property
    def score(self) -> float:
        """The expected level; levels count from 0."""
        return float(self["score"])

    @property
    def level(self) -> str:
        """The text of the most probable level."""
        return str(self["legend"][max(self.probabilities, key=self.probabilities.__getitem__)])


class MissingAnswer(AnyAnswer):
    """Why a question has no answer."""

    @property
    def code(self) -> str:
        """The code of the error."""
        return str(self["error"]["code"])

    @property
    def message(self) -> str:
        """The error in words."""
        return str(self["error"]["message"])


_KINDS: Mapping[str, type[AnyAnswer]] = {
    "noul": YesNoAnswer,
    "choice": ChosenAnswer,
    "score": ScoredAnswer,
    "error": MissingAnswer,
}


class Answers(dict[str, Any]):
    """The answers of a job: the System One response, a dict whose parts have names and types too."""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Read the response."""
        answers = {name: _KINDS.get(told["type"], AnyAnswer)(told) for name, told in body["answers"].items()}
        return cls({**body, "answers": answers})

    @property
    def model(self) -> str:
        """Which model answered, with its revision."""
        return str(self["model"])

    @property
    def answers(self) -> Mapping[str, Any]:
        """The answers by the names of their questions, each of its kind: `YesNoAnswer`, `ChosenAnswer` and so on."""
        told: Mapping[str, Any] = self["answers"]
        return told

    @property
    def usage(self) -> Mapping[str, Any]:
        """What it cost, in tokens."""
        told: Mapping[str, Any] = self["usage"]
        return told
