"""What it takes to count a request's tokens, and what is found: what the API asks of a worker beside jobs."""

from pydantic import Field

from d3serve.schemas import JobError
from d3serve.schemas.questions import Wire


class CountRequest(Wire):
    """A request as a job would store it, all texts; `lane` is the one asked for, empty where none is.

    `traceparent` is of the API's request, empty where that is in no trace.
    """

    tenant: str
    model: str
    lane: str
    state: str
    questions: str
    traceparent: str = ""


class QuestionCount(Wire):
    """A question's own tokens, and those of its whole prompt."""

    tokens: int
    prompt_tokens: int


class Count(Wire):
    """What a request would read: `total_tokens` counts the state once, `input_tokens` are all whole prompts.

    Where every question is refused, or the state itself, nothing was counted: the numbers are None then.
    """

    model: str
    state_tokens: int | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None
    questions: dict[str, QuestionCount] = Field(default_factory=dict)
    refused: list[JobError] = Field(default_factory=list)
