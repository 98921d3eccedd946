"""What every answer in JSON looks like, for the OpenAPI document: routes write these bodies themselves, and fast."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from d3serve.schemas import DecisionResponse, JobError, JobEvent, JobStatus, Lane, ModelInfo, State
from d3serve.schemas.counting import QuestionCount
from d3serve.schemas.questions import Question
from d3serve.store.records import LaneStats, Progress, QueuePosition
from d3serve.webhooks.outbox import DeliveryState, Try

# --- jobs ------------------------------------------------------------------------------------------


class RequestSummary(BaseModel):
    """What was asked; `state_tokens` is an estimate until the job has run."""

    model: str
    revision: str | None = None
    questions: int
    state_tokens: int
    lane: Lane
    priority: Literal["high", "normal", "low"]


class JobUrls(BaseModel):
    """Where to look further, relative to this host."""

    self: str
    result: str
    events: str
    cancel: str


class ShownMedium(BaseModel):
    """An image or a video that a state shows, by what it is."""

    type: Literal["image", "video"]
    sha256: str
    bytes: int


class AskedRequest(BaseModel):
    """What a job was asked, as it was sent."""

    model: str
    state: State
    questions: dict[str, Question]
    media: list[ShownMedium]


class JobResource(BaseModel):
    """The job as a client sees it; times are seconds since 1970. Trust `done`, not a list of final statuses.

    Never holds `model` and `usage` at its top level: an SDK that finds both takes the body for an answer with nothing
    in it.
    """

    id: str
    object: Literal["decision.job"]
    status: JobStatus
    done: bool
    attempt: int
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    expires_at: float | None = None
    request: RequestSummary
    queue: QueuePosition | None = None
    progress: Progress
    result: DecisionResponse | None = None
    asked: AskedRequest | None = None
    error: JobError | None = None
    metadata: dict[str, str]
    urls: JobUrls


class JobList(BaseModel):
    """A page of jobs, newest first; `cursor` asks for the next one."""

    object: Literal["list"]
    data: list[JobResource]
    has_more: bool
    cursor: str | None


# --- the service -----------------------------------------------------------------------------------


class ModelEntry(BaseModel):
    """A model as OpenAI's clients expect it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelLimits(BaseModel):
    """What a request to the model may hold."""

    tokens_per_question: int
    tokens_per_question_offline: int
    questions_per_job: int
    options_per_choice: int
    levels_per_score: int
    body_bytes: int
    media_per_job: int
    image_bytes: int
    image_pixels: int
    video_bytes: int
    video_frame_pixels: int
    video_seconds: int
    video_tokens_per_job: int


class ServedModel(BaseModel):
    """A model as System One's clients expect it, with its limits."""

    name: str
    description: str
    release_date: str
    revision: str | None
    identity: str
    weights: str
    aliases: list[str]
    modalities: list[str]
    limits: ModelLimits


class ModelList(BaseModel):
    """The models of live workers, twice: for either family of clients."""

    object: Literal["list"]
    data: list[ModelEntry]
    models: list[ServedModel]


class WaitingJobs(BaseModel):
    """The caller's own jobs that wait in a lane."""

    queued_jobs: int
    queued_tokens: int


class OwnQueue(BaseModel):
    """What a tenant is told of the queue."""

    object: Literal["decision.queue"]
    lanes: dict[Lane, WaitingJobs]


class WholeQueue(BaseModel):
    """What is told with the scope `admin`, or where there are no keys."""

    object: Literal["decision.queue"]
    lanes: dict[Lane, LaneStats]
    running_jobs: int
    workers: int
    tokens_per_s: float
    finished: dict[str, int]
    work: dict[str, int]


class WorkerResource(BaseModel):
    """A live worker; `error` says why its model could not be loaded.

    What is not known yet is null: of memory until the model is loaded, of cached states until a turn has run.
    """

    id: str
    object: Literal["decision.worker"]
    host: str
    pid: int
    lanes: list[Lane]
    load: Literal["loading", "loaded", "failed"]
    error: str | None
    model: ModelInfo | None
    running_jobs: int
    tokens_per_s: float
    cached_states: int | None = Field(description="Those that need not be read again.")
    cached_bytes: int = Field(description="What cached states take of the device.")
    cache_size_bytes: int | None = Field(description="What the device has for them.")
    memory_bytes: int | None = Field(
        description="In use after the last turn: of the GPU by whoever uses it; without one, of the process that "
        "holds the model."
    )
    memory_total_bytes: int | None = Field(description="All of the GPU's; null without one.")
    peak_memory_bytes: int | None = Field(description="Of the host, by the process that holds the model.")


class WorkerList(BaseModel):
    """Workers that have given a sign of life in the last 30 s."""

    object: Literal["list"]
    data: list[WorkerResource]


class Liveness(BaseModel):
    """The process answers."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """Jobs are taken and there is a model to answer them."""

    status: Literal["ok"]
    workers: int
    models: list[str]


# --- counting --------------------------------------------------------------------------------------

CountedTokens = Annotated[int | None, Field(description="null where every question is refused.")]


class CountLimits(BaseModel):
    """Most tokens of one whole prompt, and of the job with its state once, in the lane asked for."""

    prompt: int
    job: int


class CountEstimate(BaseModel):
    """Seconds at today's rate: before it would begin, and then until it is done."""

    queue_s: float
    work_s: float


class CountResource(BaseModel):
    """What a request would read; `fits` says that a job of it would be answered whole."""

    object: Literal["decision.count"]
    model: str
    lane: Lane
    fits: bool
    state_tokens: CountedTokens
    total_tokens: Annotated[int | None, Field(description="The state once, and all questions.")]
    input_tokens: Annotated[int | None, Field(description="All whole prompts, as `usage` has them.")]
    questions: dict[str, QuestionCount]
    refused: list[JobError]
    limits: CountLimits
    estimate: CountEstimate | None = Field(description="null until a worker has told its speed.")


# --- webhooks --------------------------------------------------------------------------------------


class EndpointResource(BaseModel):
    """A registered receiver; `events` empty means all."""

    id: str
    object: Literal["webhook.endpoint"]
    url: str
    events: list[JobEvent]
    created_at: float
    disabled_reason: str | None


class EndpointWithSecret(EndpointResource):
    """A receiver whose secret was just made, and is shown this once."""

    secret: str


class EndpointList(BaseModel):
    """The caller's receivers."""

    object: Literal["list"]
    data: list[EndpointResource]


class DeliveryResource(BaseModel):
    """One event for one receiver with every attempt; `id` is the `webhook-id` of each."""

    id: str
    object: Literal["webhook.delivery"]
    job_id: str = Field(description="Empty for a `webhook.test`.")
    event: str
    url: str
    endpoint_id: str | None
    created_at: float
    state: DeliveryState
    next_try_at: float | None
    tries: list[Try]
    traceparent: str | None


class DeliveryList(BaseModel):
    """Deliveries, newest first."""

    object: Literal["list"]
    data: list[DeliveryResource]


class WebhookSecret(BaseModel):
    """The secret that signs deliveries to the URLs that jobs name themselves."""

    object: Literal["webhook.secret"]
    secret: str
