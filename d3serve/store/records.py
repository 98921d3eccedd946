"""What the store hands out: plain, immutable records. Times are seconds since the epoch, by Redis' clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from d3serve.schemas import FINAL_STATUSES, JobError, JobStatus, Lane, ModelInfo, Usage

Stage = Literal["queued", "preparing", "deciding", "finished"]


@dataclass(frozen=True)
class Submitted:
    """What became of a submission.

    `created` is False when the idempotency key had been used for the same body: `job_id` is then the
    first submission's. `wake` says that nobody has woken the workers of `lane` yet: call
    `JobStore.send_wake(lane)`; forgetting it costs at most a few seconds, never the job.
    """

    job_id: str
    created: bool
    wake: bool
    lane: Lane


@dataclass(frozen=True)
class QueuePosition:
    """Where a queued job stands: jobs and tokens before it in its lane, and a guess in seconds.

    `eta_s` is None while no live worker has told its speed.
    """

    position: int
    ahead_tokens: int
    eta_s: float | None


@dataclass(frozen=True)
class Progress:
    """How far a job is. `questions_done` moves when a pass of the engine ends."""

    stage: Stage
    questions_done: int
    questions_total: int


@dataclass(frozen=True)
class JobRecord:
    """One job as the table holds it.

    `request` is the summary shown to clients: model, questions (count), state_tokens (an estimate until
    the job has run). `expires_at` is set once the job has ended: from then on it answers JobExpired.
    `webhook` is the submission's webhook object, or None.
    """

    id: str
    tenant: str
    status: JobStatus
    lane: Lane
    priority: str
    attempt: int
    created_at: float
    request: Mapping[str, Any]
    progress: Progress
    started_at: float | None = None
    finished_at: float | None = None
    deadline_at: float | None = None
    expires_at: float | None = None
    queue: QueuePosition | None = None
    error: JobError | None = None
    usage: Usage | None = None
    webhook: Mapping[str, Any] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    traceparent: str | None = None

    @property
    def done(self) -> bool:
        """True when the status is final and will never change again (except by `retry`)."""
        return self.status in FINAL_STATUSES


@dataclass(frozen=True)
class JobPage:
    """A page of jobs, newest first; `cursor` continues it, None ends it."""

    jobs: tuple[JobRecord, ...]
    cursor: str | None


@dataclass(frozen=True)
class LaneStats:
    """One lane: jobs that wait, their states, tokens and bytes, and how long the oldest has waited."""

    queued_jobs: int
    ready_states: int
    queued_tokens: int
    queued_bytes: int
    oldest_age_s: float


@dataclass(frozen=True)
class QueueStats:
    """The whole queue at one moment; `finished` counts final statuses since the queue was made."""

    lanes: Mapping[Lane, LaneStats]
    running_jobs: int
    workers: int
    tokens_per_s: float
    finished: Mapping[str, int]


@dataclass(frozen=True)
class WorkerInfo:
    """One live worker process. `ready` means that its model is loaded, not that its process runs."""

    id: str
    host: str
    pid: int
    lanes: tuple[Lane, ...]
    ready: bool
    load: Literal["loading", "loaded", "failed"]
    model: ModelInfo | None
    tokens_per_s: float
    turns: int
    progress_at: float | None
    error: str | None
