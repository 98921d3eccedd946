"""The kinds of questions: of each what it is on the wire, how its options read, what is wrong with them, its answer.

All that d3serve must know of a kind stands here, in a class for the question and one for its answer. Whoever checks,
renders, decides or prints asks these and need not know which kinds there are.
"""

import json
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from d3serve.text.wording import shown

MAX_OPTIONS = 255
MAX_LEVELS = 10
# What `criteria` may hold, as /v1/models says it; kits count a refusal with such words as unsupported.
LIMITS: Final[Mapping[str, int]] = {"options_per_choice": MAX_OPTIONS, "levels_per_score": MAX_LEVELS}
NO, YES = "No / false", "Yes / true"

# Unicode's spaces, line breaks, controls and formatting characters (Z*, Cc, Cf); a test compares them.
BLANK: Final = re.compile(
    r"[\x00-\x20\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f"
    r"\u2028-\u202f\u205f-\u2064\u2066-\u206f\u3000\ufeff\ufff9-\ufffb\U000110bd\U000110cd"
    r"\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]*+"
)


class Wire(BaseModel):
    """A strict, immutable object of the wire format; unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Fault(NamedTuple):
    """What is wrong with a question that has the right form: where in it, and a clause about that."""

    path: tuple[str | int, ...]
    told: str


class Row(NamedTuple):
    """An answer in a line of a table: the answer, its probability and its confidence, where it has one."""

    answer: str
    probability: float | None = None
    confidence: float | None = None


def value_text(value: JsonValue) -> str:
    """A string as it is; anything else as JSON, keys in order, non-ASCII characters as they are."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_blank(text: str) -> bool:
    """Whether no character leaves a mark: spaces, controls, zero-width and other formatting characters."""
    return BLANK.fullmatch(text) is not None


def confidence(probabilities: Sequence[float]) -> float:
    """How far a distribution is from even, as the reference runtime counts it: 1 - H(p) / ln n; 1 for one option."""
    if len(probabilities) < 2:
        return 1.0
    entropy = -math.fsum(p * math.log(p) for p in probabilities if p > 0)
    return min(1.0, max(0.0, 1.0 - entropy / math.log(len(probabilities))))


class Kind(Wire):
    """What any question can be asked. Each kind adds `type`, `instructions` and `criteria`, in this order."""

    limit: ClassVar[str] = ""  # the name among LIMITS of what `criteria` may hold
    form: ClassVar[str] = ""  # `criteria` as an example shows it to whoever sent another form
    own_keys: ClassVar[frozenset[str]] = frozenset({"instructions"})  # fields whose keys are the client's

    @abstractmethod
    def options(self) -> list[str]:
        """The text of each option, in the order of the codes, as the prompt says it."""

    @abstractmethod
    def answer(self, probabilities: Sequence[float]) -> "Answer":
        """The answer that these probabilities of the options make."""

    @abstractmethod
    def faults(self) -> Iterator[Fault]:
        """What makes it ask nothing, or an option say nothing. That two options read alike is found for all kinds."""

    def unreadable(self) -> str | None:
        """Why the reference runtime would not ask it, although its form is right."""
        return None

    def plain(self) -> dict[str, Any]:
        """The question as the reference runtime's own code takes it."""
        return self.model_dump()


# --- choice ----------------------------------------------------------------------------------------


class ChoiceAnswer(Wire):
    """The most probable option, every option's probability and how concentrated they are."""

    type: Literal["choice"] = "choice"
    choice: str
    probabilities: dict[str, float]
    confidence: float

    def row(self) -> Row:
        """The option."""
        return Row(self.choice, self.probabilities[self.choice], self.confidence)


class ChoiceQuestion(Kind):
    """Pick one option; `criteria` maps each option's name to its description (or null)."""

    limit = "options_per_choice"
    form = '{"billing": "charges, refunds", "shipping": null}'
    own_keys = frozenset({"instructions", "criteria"})

    type: Literal["choice"]
    instructions: JsonValue = None
    criteria: dict[str, JsonValue] = Field(min_length=2, max_length=MAX_OPTIONS)

    def options(self) -> list[str]:
        """Each name with its description, if it has one."""
        return [
            name if description is None else f"{name}: {value_text(description)}"
            for name, description in self.criteria.items()
        ]

    def answer(self, probabilities: Sequence[float]) -> ChoiceAnswer:
        """The most probable option; the first of equals."""
        by_option = dict(zip(self.criteria, probabilities, strict=True))
        best = max(by_option, key=by_option.__getitem__)
        return ChoiceAnswer(choice=best, probabilities=by_option, confidence=confidence(probabilities))

    def faults(self) -> Iterator[Fault]:
        """A name that is blank, or more than a line."""
        for name in self.criteria:
            if is_blank(name):
                yield Fault(("criteria",), f"has an option whose name {shown(name)} is blank")
            elif name.splitlines() != [name]:
                yield Fault(("criteria",), f"has an option whose name {shown(name)} holds a line break")


# --- noul ------------------------------------------------------------------------------------------


class NoulAnswer(Wire):
    """The probability of yes, 0 to 1."""

    type: Literal["noul"] = "noul"
    noul: float

    def row(self) -> Row:
        """Yes from one half on."""
        return Row("yes" if self.noul >= 0.5 else "no", self.noul)


class NoulCriteria(Wire):
    """What yes and no mean; a missing or null side gets the model's default text."""

    true: JsonValue = None
    false: JsonValue = None


class NoulQuestion(Kind):
    """Yes or no, answered with the probability of yes."""

    form = '{"true": "it is", "false": "it is not"}'

    type: Literal["noul"]
    instructions: JsonValue = None
    criteria: NoulCriteria | None = None

    def options(self) -> list[str]:
        """No stands before yes."""
        no, yes = (self.criteria.false, self.criteria.true) if self.criteria else (None, None)
        return [value_text(no or NO), value_text(yes or YES)]

    def answer(self, probabilities: Sequence[float]) -> NoulAnswer:
        """The probability of the second."""
        return NoulAnswer(noul=probabilities[1])

    def faults(self) -> Iterator[Fault]:
        """Neither a question nor a side that is described."""
        described = self.criteria and (self.criteria.true or self.criteria.false)
        if not self.instructions and not described:
            yield Fault((), "asks nothing: give instructions, or describe an outcome")

    def plain(self) -> dict[str, Any]:
        """Without the sides that are not described."""
        return self.model_dump(exclude_none=True)


# --- score -----------------------------------------------------------------------------------------


class ScoreAnswer(Wire):
    """The expected level (levels count from 0) with the distribution over levels."""

    type: Literal["score"] = "score"
    score: float
    confidence: float
    legend: dict[str, str]
    probabilities: dict[str, float]

    def row(self) -> Row:
        """The expected level, and the most probable one."""
        level = max(self.probabilities, key=self.probabilities.__getitem__)
        return Row(f"{self.score:.2f} ({self.legend[level]})", self.probabilities[level], self.confidence)


class ScoreQuestion(Kind):
    """A place on an ordered scale; `criteria` lists its levels, lowest first."""

    limit = "levels_per_score"
    form = '["can wait", "this week", "today"]'

    type: Literal["score"]
    instructions: JsonValue = None
    criteria: list[JsonValue] = Field(min_length=2, max_length=MAX_LEVELS)

    def options(self) -> list[str]:
        """Each level."""
        return [value_text(level) for level in self.criteria]

    def answer(self, probabilities: Sequence[float]) -> ScoreAnswer:
        """The expected level."""
        return ScoreAnswer(
            score=math.fsum(level * p for level, p in enumerate(probabilities)),
            confidence=confidence(probabilities),
            legend={str(level): _legend(text) for level, text in enumerate(self.criteria)},
            probabilities={str(level): p for level, p in enumerate(probabilities)},
        )

    def faults(self) -> Iterator[Fault]:
        """A level that says nothing."""
        for index, text in enumerate(self.options()):
            if is_blank(text) or self.criteria[index] is None:
                yield Fault(("criteria", index), "is an empty level")

    def unreadable(self) -> str | None:
        """Two levels that read alike, or an empty one."""
        texts = self.options()
        alike = len(set(texts)) < len(texts) or "" in texts
        return "score levels must be distinct and not empty" if alike else None


def _legend(level: JsonValue) -> str:
    if isinstance(level, str):
        return level
    return json.dumps(level, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


# --- all of them -----------------------------------------------------------------------------------


class QuestionError(Wire):
    """Why one question has no answer."""

    code: str
    message: str


class ErrorAnswer(Wire):
    """Stands in the place of an answer when `on_question_error` is `partial`."""

    type: Literal["error"] = "error"
    error: QuestionError

    def row(self) -> Row:
        """The code of the error."""
        return Row(self.error.code)


Question = Annotated[ChoiceQuestion | NoulQuestion | ScoreQuestion, Field(discriminator="type")]
Answer = Annotated[ChoiceAnswer | NoulAnswer | ScoreAnswer | ErrorAnswer, Field(discriminator="type")]
KINDS: Final[Mapping[str, type[Kind]]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(Question)[0])
}
