"""The job table as the API sees it (async): submit, read, wait, cancel, retry, erase, list, count."""

import types
from collections.abc import AsyncIterator, Mapping
from typing import Self

from d3serve.schemas import DecisionRequest, JobStatus, Lane, ModelInfo
from d3serve.settings import Settings
from d3serve.store.records import JobPage, JobRecord, QueueStats, Submitted, WorkerInfo


class JobStore:
    """Every method is atomic, and raises StorageUnavailable when Redis is unreachable or full.

    Use as `async with JobStore.open(settings) as store:`; one per process. `tenant` is the caller's
    identity: a job is invisible (JobNotFound) to every other tenant.
    """

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """A store on `settings.redis_url`; connects on first use."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        """Start the dispatcher that wakes waiters."""
        raise NotImplementedError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Stop the dispatcher and close the connections; waiters get ShuttingDown."""
        raise NotImplementedError

    async def submit(
        self,
        request: DecisionRequest,
        *,
        tenant: str,
        idempotency_key: str | None = None,
        fingerprint: str = "",
        traceparent: str | None = None,
    ) -> Submitted:
        """Write the job, its place in its state group and its idempotency record in one step.

        `request.model` must be the served name, aliases resolved. `fingerprint` identifies the body for
        the idempotency check. The lane is `request.job.lane`, else chosen from an estimate of the length.

        Raises:
            IdempotencyKeyReused: the key came before with another fingerprint.
            QueueFull: as many jobs, or bytes, wait as may; `details["retry_after_s"]` is a guess.
            MaxTokensExceeded: longer by far than any lane takes.
        """
        raise NotImplementedError

    async def send_wake(self, lane: Lane) -> None:
        """Tell the workers of a lane that there is work; never raises, a sweep repairs a lost wake."""
        raise NotImplementedError

    async def get(self, job_id: str, tenant: str) -> JobRecord:
        """The job now, with its queue position while it waits.

        Raises:
            JobNotFound: never accepted from this tenant.
            JobExpired: its retention has ended, or it was deleted; `details["expired_at"]` says when.
        """
        raise NotImplementedError

    async def wait(self, job_id: str, tenant: str, timeout_s: float) -> JobRecord:
        """The job as soon as it is done, or as it is after `timeout_s`. Raises like `get`."""
        raise NotImplementedError

    def watch(self, job_id: str, tenant: str) -> AsyncIterator[JobRecord]:
        """The job now, and again after every change of status or progress; ends once it is done. Raises like `get`."""
        raise NotImplementedError

    async def result(self, job_id: str, tenant: str) -> bytes:
        """The JSON text of the job's DecisionResponse, as committed.

        Raises:
            JobNotFinished: not succeeded (yet); `details["status"]` holds the status.
        and like `get`.
        """
        raise NotImplementedError

    async def cancel(self, job_id: str, tenant: str) -> JobRecord:
        """Cancel a queued or running job; a job that is done stays as it is. Raises like `get`.

        The status is `canceled` at once, and a running worker's late commit is refused.
        """
        raise NotImplementedError

    async def retry(self, job_id: str, tenant: str) -> Submitted:
        """Queue a failed, canceled or expired job again under its id.

        Raises:
            JobNotFinished: the job is queued, running or succeeded.
            JobExpired: its input is gone.
        """
        raise NotImplementedError

    async def delete(self, job_id: str, tenant: str) -> None:
        """Erase input and result of a job that is not running; from then on it answers JobExpired.

        Raises:
            JobNotFinished: the job is running; cancel it first.
        """
        raise NotImplementedError

    async def list(
        self,
        tenant: str,
        *,
        status: JobStatus | None = None,
        model: str | None = None,
        created_after: float | None = None,
        metadata: Mapping[str, str] | None = None,
        limit: int = 20,
        cursor: str | None = None,
    ) -> JobPage:
        """The tenant's jobs, newest first, that match every filter given.

        Raises:
            InvalidRequest: the cursor is not one of ours.
        """
        raise NotImplementedError

    async def models(self) -> list[ModelInfo]:
        """What live, ready workers serve, without repetition."""
        raise NotImplementedError

    async def workers(self) -> list[WorkerInfo]:
        """Every worker process that has given a sign of life in the last 30 s."""
        raise NotImplementedError

    async def stats(self) -> QueueStats:
        """Depth, age and speed of the queue."""
        raise NotImplementedError

    async def ping(self) -> None:
        """Return when Redis answers and may be written to."""
        raise NotImplementedError

    async def sweep(self) -> None:
        """Do what workers' sweepers do, for when no worker lives: end overdue jobs, free dead leases."""
        raise NotImplementedError
