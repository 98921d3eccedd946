"""OpenAI's decisions dialect as pydantic models: what is described is what is checked.

A validator in front of a field says in one clause what the field must be; pydantic alone would say so once for each
form that the field may have.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, FailFast, Field, JsonValue, StrictBool, StrictStr
from pydantic_core import PydanticCustomError

from d3serve.schemas.questions import Wire
from d3serve.text.wording import TOLD, shown


def _must(holds: Callable[[Any], bool], otherwise: str) -> BeforeValidator:
    """Let pass what holds; refuse anything else in these words, where `{}` is the value."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError(TOLD, "{told}", {"told": otherwise.format(shown(value))})
        return value

    return BeforeValidator(check)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_full_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_value(value: Any) -> bool:
    return isinstance(value, str | bool)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _is_text_or_parts(value: Any) -> bool:
    return isinstance(value, str | None) or (
        isinstance(value, list) and all(isinstance(one, str | dict) for one in value)
    )


_TEXT_OR_NULL: Final = _must(lambda value: isinstance(value, str | None), "must be a string, not {}")
_OBJECTS: Final = _must(_is_list_of_objects, "must be a list of objects, not {}")

# --- what is asked ---------------------------------------------------------------------------------

Part = str | dict[str, JsonValue]
Text = Annotated[str | None, _TEXT_OR_NULL]
Instructions = Annotated[
    str | list[Part] | None, _must(_is_text_or_parts, "must be a string or a list of parts, not {}")
]


class ChoiceOption(Wire):
    """One value to choose; true and false are values of their own."""

    value: Annotated[
        StrictStr | StrictBool,
        _must(_is_value, "has a value {}; a value is text or a bool"),
    ]
    description: Text = None


class ScoreLevel(Wire):
    """One level of a scale."""

    label: Annotated[str, _must(lambda value: isinstance(value, str), "has a label {}; a label is text")]
    description: Text = None


class PredicateAsked(Wire):
    """How likely a statement about the input is true."""

    type: Literal["predicate"]
    name: Text = None
    instructions: Instructions = None


class ChoiceAsked(Wire):
    """Which of 2 to 255 values fits the input."""

    type: Literal["choice"]
    name: Text = None
    instructions: Instructions = None
    choices: Annotated[list[ChoiceOption], FailFast(), _OBJECTS]


class ScoreAsked(Wire):
    """Where the input stands on a scale of 2 to 10 levels, lowest first."""

    type: Literal["score"]
    name: Text = None
    instructions: Instructions = None
    levels: Annotated[list[ScoreLevel], FailFast(), _OBJECTS]


QuestionAsked = Annotated[PredicateAsked | ChoiceAsked | ScoreAsked, Field(discriminator="type")]


class OpenAIDecisionRequest(Wire):
    """A request in OpenAI's dialect: questions in order, about an input."""

    model: Annotated[str, _must(_is_name, "must name a model, not {}")]
    input: Annotated[
        str | list[Any],
        _must(lambda value: isinstance(value, str | list), "must be a string or a list, not {}"),
    ]
    questions: Annotated[
        list[QuestionAsked],
        Field(min_length=1),
        _must(
            lambda value: isinstance(value, list) and bool(value),
            "must be a list with at least one question, not {}",
        ),
    ]
    prompt_cache_key: Any = Field(default=None, description="Taken, and without effect.")
    prompt_cache_options: Any = Field(default=None, description="Taken, and without effect.")
    safety_identifier: Any = Field(default=None, description="Taken, and without effect.")


# --- what is answered ------------------------------------------------------------------------------


class PredicateAnswer(BaseModel):
    """The probability that the statement is true."""

    name: str | None
    type: Literal["predicate"]
    probability: float


class ValueProbability(BaseModel):
    """One value of a choice."""

    value: StrictStr | StrictBool
    probability: float


class ChoiceMade(BaseModel):
    """The most probable value, and how concentrated the probabilities are."""

    name: str | None
    type: Literal["choice"]
    choice: StrictStr | StrictBool
    probabilities: list[ValueProbability]
    confidence: float


class LevelProbability(BaseModel):
    """One level of a score."""

    value: int
    label: str
    probability: float


class ScoreGiven(BaseModel):
    """The expected level, counted from 0."""

    name: str | None
    type: Literal["score"]
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class Refusal(BaseModel):
    """Stands in the place of an answer that there is none of."""

    name: str | None
    type: Literal["refusal"]


class InputTokensDetails(BaseModel):
    """What of the input had been read before."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Nothing is written."""

    reasoning_tokens: int


class DecisionUsage(BaseModel):
    """What the decision cost, as OpenAI counts it."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OpenAIDecision(BaseModel):
    """The response in OpenAI's dialect: answers in the order of the questions."""

    id: str
    object: Literal["decision"]
    model: str
    answers: list[Annotated[PredicateAnswer | ChoiceMade | ScoreGiven | Refusal, Field(discriminator="type")]]
    usage: DecisionUsage
