"""The job table as the API sees it (async): submit, read, wait, cancel, retry, erase, list, count."""

import asyncio
import hashlib
import secrets
import time
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn, Self

from d3serve.errors import (
    AlreadySucceeded,
    JobExpired,
    JobNotFinished,
    JobNotFound,
    ShuttingDown,
    StorageUnavailable,
)
from d3serve.schemas import DecisionRequest, JobStatus, Lane, ModelInfo
from d3serve.settings import Settings
from d3serve.store.census import LANES, Census
from d3serve.store.connect import AsyncRedisClient
from d3serve.store.encode import EncodedJob, EncodedRequest, encode_job, encode_request, key_reused
from d3serve.store.erasure import Eraser
from d3serve.store.limits import Limits
from d3serve.store.listing import Filters, page
from d3serve.store.memory import MemoryGuard
from d3serve.store.records import JobRecord, Progress, QueueStats, RecordPage, Submitted, WorkerInfo, summary
from d3serve.store.states import LargeStates
from d3serve.store.table import AsyncStore
from d3serve.store.tally import Counted
from d3serve.store.waiters import REREAD_S, Changes, Dispatcher

IDEMPOTENCY_TTL_S = 86_400  # longer than any client goes on trying
CALLERS_TTL_S = 120  # longer than any call waits: a dead API process is forgotten


class JobStore(AsyncStore):
    """Raises StorageUnavailable when Redis is unreachable or full; what changes a job does so in one step.

    Use as `async with JobStore.open(settings) as store:`; one per process. `tenant` is the caller's
    identity: a job is invisible (JobNotFound) to every other tenant.
    """

    def __init__(self, client: AsyncRedisClient, settings: Settings) -> None:
        super().__init__(client, settings)
        self._settings = settings
        self._census = Census(self._table)
        self._memory = MemoryGuard(self._table)
        self._states = LargeStates(self._table, settings.state_dir)
        self._eraser = Eraser(self._table)
        self._dispatcher = Dispatcher(client, self._key("done"))

    async def __aenter__(self) -> Self:
        """Start the dispatcher that wakes waiters."""
        self._dispatcher.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Stop the dispatcher, let its waiters go, and close the connections."""
        await self._dispatcher.stop()
        await self.aclose()

    @property
    def stopping(self) -> bool:
        """Whether waiters have been released."""
        return self._dispatcher.closed

    def release_waiters(self) -> None:
        """Let everybody who waits for a job go, now and from now on: the process has been told to stop."""
        self._dispatcher.release()

    @property
    def _limits(self) -> Limits:
        return Limits(self._settings, self._census)

    # --- changing jobs -----------------------------------------------------------------------------

    async def submit(
        self,
        request: DecisionRequest | EncodedRequest,
        *,
        tenant: str,
        idempotency_key: str | None = None,
        fingerprint: str = "",
        idempotency_ttl_s: int | None = None,
        revision: str = "",
        traceparent: str | None = None,
    ) -> Submitted:
        """Write the job, its place in its state group and its idempotency record in one step.

        `request.model` must be the served name, aliases resolved; with `revision`, only a worker that serves that
        one answers. `fingerprint` identifies the body for the idempotency check; the record lives for
        `idempotency_ttl_s`, by default a day. The lane is `request.job.lane`, else chosen by an estimate of its length.

        Raises:
            IdempotencyKeyReused: the key came before with another fingerprint; `details["job_id"]` says for which job.
            QueueFull: as many jobs, or bytes, wait as may; `details["retry_after_s"]` is a guess.
            QuotaExceeded: of this tenant as many jobs wait, or bytes are kept, as may.
            StorageUnavailable: also before Redis is quite full.
        """
        if isinstance(request, DecisionRequest):  # a large one is better encoded off the event loop
            request = encode_request(request)
        job = encode_job(self._settings, request, tenant=tenant, revision=revision, traceparent=traceparent)
        idem_ttl_s = idempotency_ttl_s or IDEMPOTENCY_TTL_S
        idem = "" if idempotency_key is None else _digest(f"{tenant}\0{idempotency_key}")
        job_id = f"job_{secrets.token_hex(12)}"
        await self._memory.admit()
        answer = await self._states.submit(job, lambda state: self._table.run(
            "submit", job_id, job.group, job.lane, tenant, state, len(job.state), job.questions,
            job.rank_offset_ms, job.expires_ms, idem, fingerprint, 1000 * idem_ttl_s,
            *self._limits.arguments,
            *(part for field in job.fields.items() for part in field),
        ))  # fmt: skip
        if answer[0] == "reused":
            raise key_reused(fingerprint, *answer[1:])
        if answer[0] in ("full", "quota"):
            raise await self._limits.refusal(tenant, *answer)
        return _submitted(answer, fresh=(request, tenant, job))

    async def cancel(self, job_id: str, tenant: str) -> JobRecord:
        """Cancel a queued or running job; a job that is done stays as it is. Raises like `get`.

        The status is `canceled` at once, and a running worker's late commit is refused.
        """
        await self._table.run("cancel", job_id, tenant)
        return await self.get(job_id, tenant)

    async def retry(self, job_id: str, tenant: str) -> Submitted:
        """Queue a failed, canceled or expired job again under its id.

        Raises:
            AlreadySucceeded: the job has its answers.
            JobNotFinished: the job is queued or running; `details["status"]` says which.
            JobExpired: its input is gone.
        and like `get`.
        """
        answer = await self._table.run("retry", job_id, tenant)
        if answer[0] == "new":
            return _submitted(answer)
        job = await self.get(job_id, tenant)
        if answer[0] == "gone":
            raise JobExpired(f"the input of job {job_id} is gone")
        if answer[0] == "succeeded":
            raise AlreadySucceeded(
                f"job {job_id} has succeeded, and its answers stay: submit a new job to ask again",
                details={"status": job.status},
            )
        raise JobNotFinished(
            f"job {job_id} is {job.status}: only a failed, canceled or expired job can be retried",
            details={"status": job.status},
        )

    async def delete(self, job_id: str, tenant: str) -> None:
        """Erase input and result of a job that is not running; from then on it answers JobExpired.

        Raises:
            JobNotFinished: the job is running; cancel it first.
        and like `get`.
        """
        answer = await self._table.run("delete", job_id, tenant)
        if answer[0] == -1:
            await self._raise_missing(job_id, tenant)
        if answer[0] == 0:
            raise JobNotFinished(f"job {job_id} is running: cancel it first", details={"status": answer[1]})

    async def join(self, job_id: str) -> None:
        """Count in one synchronous call that waits for the job; `leave` counts it out."""
        key = self._key("callers", job_id)
        async with self._table.pipeline(transaction=True) as pipe:
            await pipe.incr(key).expire(key, CALLERS_TTL_S).execute()

    async def leave(self, job_id: str) -> None:
        """Count out one synchronous call."""
        key = self._key("callers", job_id)
        async with self._table.pipeline(transaction=True) as pipe:
            await pipe.decr(key).expire(key, CALLERS_TTL_S).execute()

    async def callers(self, job_id: str) -> int:
        """Tell how many synchronous calls wait for the job, in every API process together."""
        return int(await self._table.send("get", self._key("callers", job_id)) or 0)

    async def count_request(self, key_id: str, window_s: int) -> tuple[int, float]:
        """Count one request of a caller; tell how many it has sent in this window, and when that ends, in seconds."""
        count, left_ms = await self._table.run("rate", key_id, 1000 * window_s)
        return count, max(left_ms, 0) / 1000

    async def sweep(self) -> list[Lane]:
        """Do what nobody asks for: end overdue jobs and free dead leases, as workers do while one lives; remove states
        that nobody needs, and erased texts from the append-only file. The lanes whose workers must be woken.
        """
        *_, wakes = await self._table.run("reap", *LANES)
        await self._states.sweep()
        await self._eraser.sweep()
        return list(wakes)

    # --- reading jobs ------------------------------------------------------------------------------

    async def get(self, job_id: str, tenant: str) -> JobRecord:
        """Read the job, with its queue position while it waits.

        Raises:
            JobNotFound: never accepted from this tenant.
            JobExpired: its retention has ended, or it was deleted; `details["expired_at"]` says when.
        """
        return await self._with_position(await self._read(job_id, tenant))

    async def wait(self, job_id: str, tenant: str, timeout_s: float) -> JobRecord:
        """Read the job once it is done, with its result, or as it is after `timeout_s` or when waiters are released.

        Raises like `get`.
        """
        until = time.monotonic() + timeout_s
        with self._dispatcher.register(
            job_id, lambda: self._read_whole(job_id, None), final_only=True
        ) as waiter:
            job = await self._read_within(job_id, tenant, until)
            while not (job.done or self.stopping) and (left := until - time.monotonic()) > 0:
                await self._pause(waiter.event, left)
                job = waiter.take() or await self._read_within(job_id, tenant, until)
            return await self._with_position(job)

    async def _read_within(self, job_id: str, tenant: str, until: float) -> JobRecord:
        """Read the job, if need be after a restart or a failover of Redis: the client has time."""
        while True:
            try:
                return await self._read_whole(job_id, tenant)
            except StorageUnavailable:
                if until - time.monotonic() <= REREAD_S or self.stopping:
                    raise
                await asyncio.sleep(REREAD_S)

    async def watch(self, job_id: str, tenant: str, quiet_s: float | None = None) -> Changes:
        """Yield the job now and after every change of status or progress, until it is done.

        And None, whenever nothing has changed for `quiet_s`. Who leaves early closes it, or the job stays watched.

        Raises:
            ShuttingDown: waiters were released meanwhile.
        and like `get`.
        """
        with self._dispatcher.register(
            job_id, lambda: self._read_whole(job_id, None), final_only=False
        ) as waiter:
            job = await self.get(job_id, tenant)
            yield job
            while not job.done:
                await self._pause(waiter.event, quiet_s)
                if self.stopping:
                    raise ShuttingDown("the service is stopping; ask again")
                if not waiter.event.is_set():
                    yield None
                    continue
                last, job = job, waiter.take() or await self.get(job_id, tenant)
                if job != last:
                    yield job

    async def result(self, job_id: str, tenant: str) -> bytes:
        """Read the JSON text of the job's DecisionResponse, as committed. Raises like `finished`."""
        return (await self.finished(job_id, tenant))[1]

    async def finished(self, job_id: str, tenant: str) -> tuple[JobRecord, bytes]:
        """Read a job that has succeeded, and its result.

        Raises:
            JobNotFinished: not succeeded (yet); `details["status"]` holds the status.
        and like `get`.
        """
        job = await self.get(job_id, tenant)
        if job.status != "succeeded":
            raise JobNotFinished(f"job {job_id} is {job.status}", details={"status": job.status})
        text = await self._table.send("get", self._key("res", job_id))
        if text is None:
            await self._raise_missing(job_id, tenant)
        return job, str(text).encode()

    async def asked(self, job_id: str) -> tuple[str, str]:
        """Read the state of a job that its tenant has read, and its questions, as they are stored.

        Raises:
            RequestErased: they are no longer kept.
        """
        return await self._states.asked(job_id)

    async def list_jobs(
        self,
        tenant: str,
        *,
        status: JobStatus | None = None,
        model: str | None = None,
        created_after: float | None = None,
        metadata: Mapping[str, str] | None = None,
        limit: int = 20,
        cursor: str | None = None,
    ) -> RecordPage:
        """Read the tenant's jobs, newest first, that match every filter given.

        A page may hold fewer than `limit` jobs and still have a cursor, where a filter matches little.

        Raises:
            InvalidRequest: the cursor is not one of ours.
        """
        filters = Filters(status, model, created_after, metadata)
        return await page(self._table, tenant, filters, limit, cursor)

    async def models(self) -> list[ModelInfo]:
        """Tell what live workers serve, without repetition; one that loads again after a crash still counts."""
        return await self._census.models()

    async def workers(self) -> list[WorkerInfo]:
        """Tell every worker process that has given a sign of life in the last 30 s."""
        return await self._census.workers()

    async def running(self) -> Mapping[str, int]:
        """Tell how many jobs each worker runs, by the worker's id."""
        return await self._census.running()

    async def stats(self) -> QueueStats:
        """Tell depth, age and speed of the queue."""
        return await self._census.stats()

    async def tally(self) -> Counted:
        """Tell what all processes have counted, and how long things took."""
        return await self._census.tally()

    async def waiting_of(self, tenant: str) -> dict[Lane, dict[str, int]]:
        """Tell what of a tenant's jobs waits, lane by lane: `queued_jobs` and `queued_tokens`."""
        return await self._census.waiting_of(tenant)

    async def ping(self) -> None:
        """Return when Redis answers and takes new jobs."""
        await self._table.send("ping")
        await self._memory.admit()

    # --- the small parts ---------------------------------------------------------------------------

    async def _read(self, job_id: str, tenant: str | None) -> JobRecord:
        return await self._record(job_id, tenant, await self._table.send("hgetall", self._key("job", job_id)))

    async def _read_whole(self, job_id: str, tenant: str | None) -> JobRecord:
        """Read the job, and its result if there is one, in one round trip: who waits for its end wants both."""
        async with self._table.pipeline() as pipe:
            rows = await pipe.hgetall(self._key("job", job_id)).get(self._key("res", job_id)).execute()
        return await self._record(job_id, tenant, *rows)

    async def _record(
        self, job_id: str, tenant: str | None, row: Mapping[str, str], result: str | None = None
    ) -> JobRecord:
        """The job as read; tenant None: for waiters who have read it as its tenant."""
        if not row or tenant not in (None, row["tenant"]):
            await self._raise_missing(job_id, tenant)
        return JobRecord.from_hash(job_id, row, result)

    async def _with_position(self, job: JobRecord) -> JobRecord:
        if job.status != "queued":
            return job
        place = await self._census.position(job.id)
        return job.waiting_at(place) if place else job

    async def _pause(self, event: asyncio.Event, left_s: float | None) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), left_s)

    async def _raise_missing(self, job_id: str, tenant: str | None) -> NoReturn:
        """Tell a job that was from one that never was."""
        stone = await self._table.send("get", self._key("gone", job_id))
        expired_ms, _, owner = (stone or "").partition(" ")
        if owner != tenant:
            raise JobNotFound(f"no job {job_id}")
        raise JobExpired(
            f"job {job_id} and its result are no longer kept", details={"expired_at": int(expired_ms) / 1000}
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _submitted(answer: list[Any], fresh: tuple[EncodedRequest, str, EncodedJob] | None = None) -> Submitted:
    kind, job_id, wake, lane, _, *created = answer
    job = _fresh_record(job_id, int(created[0]), *fresh) if fresh and created else None
    return Submitted(job_id=job_id, created=kind == "new", wake=bool(wake), lane=lane, job=job)


def _fresh_record(
    job_id: str, created_ms: int, request: EncodedRequest, tenant: str, job: EncodedJob
) -> JobRecord:
    """What `get` would read now, but for the place in the queue."""
    total = request.count
    return JobRecord(
        id=job_id, tenant=tenant, status="queued", lane=job.lane, priority=request.options.priority, attempt=0,
        created_at=created_ms / 1000, progress=Progress("queued", 0, total),
        request=summary(request.model, str(job.fields.get("revision", "")), total, int(job.fields["state_tokens"])),
        deadline_at=(created_ms + job.expires_ms) / 1000 if job.expires_ms else None,
        metadata=request.options.metadata,
    )  # fmt: skip
