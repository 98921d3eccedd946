"""What the store hands out: plain, immutable records. Times are seconds since the epoch, by Redis' clock."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from d3serve.schemas import FINAL_STATUSES, JobError, JobStatus, Lane, ModelInfo, Usage

Stage = Literal["queued", "preparing", "deciding", "finished"]


@dataclass(frozen=True)
class Submitted:
    """What became of a submission.

    `created` is False when the idempotency key had been used for the same body: `job_id` is then the
    first submission's. `wake` says that nobody has woken the workers of `lane` yet: send
    them a wake-up; forgetting it costs at most a few seconds, never the job. `job` is the job as
    it was just written, or None where it has to be read.
    """

    job_id: str
    created: bool
    wake: bool
    lane: Lane
    job: "JobRecord | None" = None


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
    """How far a job is. It is committed as a whole, so `questions_done` is 0 until all are; `stage` moves before.

    `fraction` is the share of a long job's work that is done, from 0 to 1, and grows while an attempt runs; `eta_s` is
    about how many seconds are left, while that is known.
    """

    stage: Stage
    questions_done: int
    questions_total: int
    fraction: float = 0.0
    eta_s: float | None = None


@dataclass(frozen=True)
class JobRecord:
    """One job as the table holds it.

    `request` is the summary shown to clients: model, questions (count), state_tokens (an estimate until
    the job has run). `expires_at` is set once the job has ended: from then on it answers JobExpired.
    `webhook` is the submission's webhook object, or None. `pass_ms` is how long the passes took that answered it, and
    `identity` which weights: `ModelInfo.identity` of its worker. `result` is the JSON text of the DecisionResponse of a
    job that has succeeded, where it was read with the job, as for those who wait.
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
    pass_ms: float | None = None
    identity: str = ""
    webhook: Mapping[str, Any] | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    traceparent: str | None = None
    result: bytes | None = field(default=None, repr=False, compare=False)

    @property
    def done(self) -> bool:
        """True when the status is final and will never change again (except by `retry`)."""
        return self.status in FINAL_STATUSES

    @classmethod
    def from_hash(cls, job_id: str, row: Mapping[str, str], result: str | None = None) -> Self:
        """The record of the hash `job:<id>`, and of `res:<id>` if that was read too."""
        usage = Usage.model_validate_json(row["usage"]) if "usage" in row else None
        total = int(row["questions"])
        state_tokens = usage.state_tokens if usage else int(row["state_tokens"])
        return cls(
            id=job_id,
            tenant=row["tenant"],
            status=row["status"],  # type: ignore[arg-type] # only our scripts write it
            lane=row["lane"],  # type: ignore[arg-type] # as above
            priority=row["priority"],
            attempt=int(row["attempt"]),
            created_at=int(row["created"]) / 1000,
            started_at=_seconds(row.get("started")),
            finished_at=_seconds(row.get("finished")),
            deadline_at=_seconds(row.get("deadline")),
            expires_at=_seconds(row.get("expires")),
            request=summary(row["model"], row.get("revision", ""), total, state_tokens),
            progress=Progress(
                row["stage"],  # type: ignore[arg-type] # only our scripts write it
                int(row["questions_done"]),
                total,
                1.0 if row["status"] == "succeeded" else float(row.get("fraction", 0)),
                float(row["eta_s"]) if row["status"] == "running" and "eta_s" in row else None,
            ),
            error=JobError.model_validate_json(row["error"]) if "error" in row else None,
            usage=usage,
            pass_ms=float(row["pass_ms"]) if "pass_ms" in row else None,
            identity=row.get("identity", ""),
            webhook=json.loads(row["webhook"]) if row.get("webhook") else None,
            metadata=json.loads(row["metadata"]),
            traceparent=row.get("traceparent") or None,
            result=None if result is None else result.encode(),
        )

    def waiting_at(self, queue: QueuePosition) -> Self:
        """The same job with its place in the queue."""
        return replace(self, queue=queue)


def summary(model: str, revision: str, questions: int, state_tokens: int) -> dict[str, Any]:
    """What of a request its job shows; `revision` where it named one."""
    named = {"model": model, "revision": revision} if revision else {"model": model}
    return {**named, "questions": questions, "state_tokens": state_tokens}


def _seconds(ms: str | None) -> float | None:
    return int(ms) / 1000 if ms and ms != "0" else None


def _number(row: Mapping[str, str], name: str) -> int | None:
    return int(row[name]) if name in row else None


@dataclass(frozen=True)
class RecordPage:
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
    """The whole queue at one moment.

    Since the queue was made: `finished` counts final statuses; `work` counts, over answered jobs, `tokens_asked` (each
    question's whole prompt), `tokens_read`, and states by `states_cached` and `states_read`.
    """

    lanes: Mapping[Lane, LaneStats]
    running_jobs: int
    workers: int
    tokens_per_s: float
    finished: Mapping[str, int]
    work: Mapping[str, int]


@dataclass(frozen=True)
class WorkerInfo:
    """One live worker process. `ready` means that its model is loaded, not that its process runs.

    `cached_states` is how many states it need not read again, `peak_memory_bytes` the most host memory that the process
    of its model has held; None until it has run a turn. `cached_bytes` is what its cached states take of the device, of
    `cache_size_bytes` there. `memory_bytes` is what is in use of its GPU, of `memory_total_bytes`, or what the process
    of its model holds, where there is no GPU and no total. `busy_s` is how long its passes have taken since its process
    began.
    """

    id: str
    host: str
    pid: int
    lanes: tuple[Lane, ...]
    ready: bool
    load: Literal["loading", "loaded", "failed"]
    model: ModelInfo | None
    tokens_per_s: float
    error: str | None
    cached_states: int | None = None
    peak_memory_bytes: int | None = None
    cached_bytes: int = 0
    cache_size_bytes: int | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    busy_s: float = 0.0

    @classmethod
    def from_hash(cls, worker_id: str, row: Mapping[str, str]) -> Self:
        """The record of the hash `worker:<id>`."""
        load = row.get("load", "loading")
        return cls(
            id=worker_id,
            host=row.get("host", ""),
            pid=int(row.get("pid", "0")),
            lanes=tuple(row["lanes"].split(",")) if row.get("lanes") else (),  # type: ignore[arg-type] # ours
            ready=load == "loaded",
            load=load,  # type: ignore[arg-type] # only workers write it
            model=ModelInfo.model_validate_json(row["model"]) if row.get("model") else None,
            tokens_per_s=float(row.get("tokens_per_s", "0")),
            error=row.get("error") or None,
            cached_states=_number(row, "cached_states"),
            peak_memory_bytes=_number(row, "peak_memory_bytes"),
            cached_bytes=int(row.get("cached_bytes", 0)),
            cache_size_bytes=_number(row, "cache_size_bytes"),
            memory_bytes=_number(row, "memory_bytes"),
            memory_total_bytes=_number(row, "memory_total_bytes"),
            busy_s=float(row.get("busy_s", 0)),
        )
