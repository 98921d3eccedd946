"""The wire types that both sides of the queue agree on, beside the questions: the request, the response, the job.

Everything is strict: a bool is no int, an unknown field is an error. Objects keep the order in which
their keys were received, since the order is part of the prompt.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from d3serve.schemas.questions import Answer, Question, Wire

JobStatus = Literal["queued", "running", "succeeded", "failed", "canceled", "expired"]
FINAL_STATUSES: frozenset[JobStatus] = frozenset({"succeeded", "failed", "canceled", "expired"})
Modality = Literal["text", "image", "video"]
Lane = Literal["interactive", "offline"]

JobEvent = Literal["job.succeeded", "job.failed", "job.canceled", "job.expired"]
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]

State = str | dict[str, JsonValue] | list[JsonValue]


class Usage(Wire):
    """What a job cost, in tokens.

    `input_tokens` is the sum of its questions' whole prompts (what the reference runtime reports);
    `computed_tokens` is what the device really read for this job; `state_tokens` is the length of its
    state block (0 where nothing is shared); `media_tokens` are those of each prompt that the state's images and
    videos take, markers and times included; `state_cached` says that the state had been read before.
    """

    input_tokens: int
    output_tokens: int = 0
    computed_tokens: int
    state_tokens: int
    media_tokens: int = 0
    state_cached: bool
    questions: int


class DecisionResponse(Wire):
    """The System One response: what `/v1/systemone` and a job's result return."""

    model: str
    answers: dict[str, Answer]
    usage: Usage


class ModelInfo(Wire):
    """What a worker serves; it publishes this, and `/v1/models` shows it.

    `identity` tells its weights from all others, of the same name too; empty: nobody knows. `weights` is what its
    matrices are held as: a dtype, float8 or int4; empty: an older worker has not said. `modalities` are what a state
    may hold.
    """

    name: str
    revision: str | None = None
    identity: str = ""
    attention_mode: str
    prompt_layout: str | None = None
    validated_length: int
    max_length: int
    dtype: str
    weights: str = ""
    device: str
    modalities: tuple[Modality, ...] = ("text",)

    @property
    def full_name(self) -> str:
        """The name that pins the weights: `name@revision`."""
        return f"{self.name}@{self.revision}" if self.revision else self.name


# --- jobs ------------------------------------------------------------------------------------------


class WebhookTarget(Wire):
    """Where a job's events go: an address, or an endpoint registered before; all events if none are named."""

    url: str | None = Field(default=None, max_length=2048)
    endpoint_id: str | None = Field(default=None, max_length=64)
    events: list[JobEvent] | None = Field(default=None, min_length=1, max_length=4)

    @model_validator(mode="after")
    def _has_one_target(self) -> Self:
        if (self.url is None) == (self.endpoint_id is None):
            raise ValueError("must name either a url or an endpoint_id")
        return self


class JobOptions(Wire):
    """The `job` object of a submission; every field has a default."""

    lane: Lane | None = None
    priority: Literal["high", "normal", "low"] = "normal"
    expires_in_s: int | None = Field(default=None, ge=1, le=7 * 86_400)
    timeout_s: int | None = Field(default=None, ge=1, le=86_400)
    result_ttl_s: int | None = Field(default=None, ge=60, le=7 * 86_400)
    webhook: WebhookTarget | None = None
    metadata: Metadata = Field(default_factory=dict)
    on_question_error: Literal["fail", "partial"] = "fail"


class Asset(Wire):
    """An image that a placeholder in the state names: its bytes in base64, or the part of the body that holds them."""

    type: Literal["image"]
    format: str | None = None
    data_base64: str | None = None
    part: str | None = None


class DecisionRequest(Wire):
    """A System One request body, with `job` options beside it; `images` and `videos` are data URLs."""

    model: str
    state: State
    questions: dict[str, Question]
    job: JobOptions = JobOptions()
    images: list[str] | None = None
    videos: list[str] | None = None
    assets: dict[str, Asset] | None = None


class JobError(Wire):
    """Why a job failed, in the words of the error tree."""

    code: str
    message: str
    retryable: bool = False
    field: str | None = None
