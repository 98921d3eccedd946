"""Synchronous calls over jobs: one job for all retries of a call, an honest 504 before the client gives up.

The stock SDK gives up after 10 s and sends the same request again, three times in all, on any 5xx. So
identical calls share one job (also across API processes: the record is in Redis), a call that would outlast
the SDK's patience ends with 504 `still_running` and `retry-after-ms: 0`, and its retry waits on.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Self

from starlette.requests import ClientDisconnect, Request

from d3serve.api import bounds
from d3serve.api.dependencies import Parts, SubmitHeaders
from d3serve.api.dialect import AnswerNames
from d3serve.api.intake import Taken
from d3serve.api.problems import error_of
from d3serve.api.webhook_checks import check_job_webhook
from d3serve.errors import (
    AlreadySucceeded,
    CallExpired,
    D3ServeError,
    JobExpired,
    JobNotFinished,
    ShuttingDown,
    StillRunning,
)
from d3serve.store.encode import EncodedRequest
from d3serve.store.records import JobRecord, Submitted
from d3serve.tracing import say_job

KEEP_S: Final = 600  # an answered call's job, and the record that joins identical calls to it
ABANDONED_AFTER_S = 6.0  # longer than the SDK sleeps between its tries


@dataclass(frozen=True)
class Answered:
    """A finished job with its response, the JSON text that the worker committed."""

    job: JobRecord
    response: bytes


@dataclass(frozen=True)
class SynchronousCall:
    """One synchronous request: who asks what; `fingerprint` is what identical calls share."""

    request: Request
    parts: Parts
    tenant: str
    decision: EncodedRequest
    revision: str
    fingerprint: str
    names: AnswerNames | None
    sent: SubmitHeaders

    @classmethod
    async def make(
        cls, request: Request, parts: Parts, tenant: str, taken: Taken, sent: SubmitHeaders
    ) -> Self:
        """A call for the model that is really served; its job is kept for ten minutes unless asked otherwise.

        Raises:
            ModelNotFound: nobody serves it.
        """
        options = taken.request.options
        await check_job_webhook(options.webhook, request, parts, tenant)
        if options.result_ttl_s is None:
            options = options.model_copy(update={"result_ttl_s": KEEP_S})
        model, revision = await parts.models.resolve(taken.request.model, taken.request.kinds)
        decision = replace(taken.request, model=model, options=options)
        return cls(request, parts, tenant, decision, revision, taken.request.fingerprint, taken.names, sent)

    async def submit(self) -> Submitted:
        """Make the job, or find the one that an identical call made, as long as its answer is what we would give."""
        key = self.sent.idempotency_key or self.fingerprint
        key = f"{self.request.url.path} {self.decision.model}@{self.revision} {key}"
        while not (submitted := await self._submit(key)).created:
            if found := await self._found(submitted):
                return found
            key = f"{key} {submitted.job_id}"  # that one gives no answer for now: the same question is a new one
        return submitted

    async def _found(self, submitted: Submitted) -> Submitted | None:
        """The job of an identical call, queued again if it ended for a reason that is not the request's.

        None if it has an answer of other weights, or has gone, or its input has.
        """
        with suppress(JobExpired):
            job = await self.parts.store.get(submitted.job_id, self.tenant)
            if job.status == "succeeded" and not self.sent.idempotency_key:
                return submitted if await self._is_current(job) else None
            ours = job.status in ("canceled", "expired") or (
                job.error is not None and error_of(job.error).http_status >= 500
            )
            if ours:
                with suppress(JobNotFinished, AlreadySucceeded):  # another call was quicker
                    return self._woken(await self.parts.store.retry(job.id, self.tenant))
            return submitted
        return None

    async def _is_current(self, job: JobRecord) -> bool:
        return await self.parts.models.answered_alike(job.identity, self.decision.model, self.revision)

    async def _submit(self, key: str) -> Submitted:
        return self._woken(
            await self.parts.store.submit(
                self.decision,
                tenant=self.tenant,
                idempotency_key=key,
                fingerprint=self.fingerprint,
                idempotency_ttl_s=None if self.sent.idempotency_key else KEEP_S,
                revision=self.revision,
                traceparent=self.sent.traceparent,
            )
        )

    def _woken(self, submitted: Submitted) -> Submitted:
        if submitted.wake:
            self.parts.background.wake(submitted.lane)
        return submitted

    async def answer(self, job_id: str) -> Answered:
        """The response once the job is done.

        Raises:
            StillRunning: not done within the wait; `details["job_id"]` names the job, which goes on.
            CallExpired: the job did not start or end in time, or was erased meanwhile.
            ClientDisconnect: the caller is gone; the job is canceled unless somebody asks again soon.
            D3ServeError: the job failed, as the error that it failed by.
        """
        store = self.parts.store
        say_job(job_id)
        await store.join(job_id)
        try:
            return await self._answered(job_id)
        except JobExpired:
            raise CallExpired(f"job {job_id} was erased while this call waited for it") from None
        finally:
            self.parts.background.start(self._leave(job_id))

    async def _leave(self, job_id: str) -> None:
        """Count this call out, which its answer need not wait for."""
        with suppress(D3ServeError):  # the count runs out by itself
            await self.parts.store.leave(job_id)

    async def _answered(self, job_id: str) -> Answered:
        job = await self._wait(job_id)
        if not job.done and self.parts.store.stopping:
            raise ShuttingDown(f"the service is stopping and job {job_id} is {job.status}; ask again")
        if not job.done:
            raise StillRunning(
                f"job {job_id} is {job.status}; ask again, or poll /v1/jobs/{job_id}",
                details={"job_id": job_id, "retry_after_s": 0},
            )
        if job.error is not None:
            raise CallExpired(job.error.message) if job.status == "expired" else error_of(job.error)
        return Answered(job, job.result or await self.parts.store.result(job_id, self.tenant))

    async def _wait(self, job_id: str) -> JobRecord:
        wanted = self.sent.wait_s if self.sent.wait_s is not None else bounds.SYNC_WAIT_S
        waiting = asyncio.create_task(
            self.parts.store.wait(job_id, self.tenant, min(wanted, bounds.MAX_WAIT_S))
        )
        gone = asyncio.create_task(_disconnected(self.request))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        finally:
            gone.cancel()
            waiting.cancel()
        self.parts.background.start(self._cancel_if_abandoned(job_id))
        raise ClientDisconnect

    async def _cancel_if_abandoned(self, job_id: str) -> None:
        await asyncio.sleep(ABANDONED_AFTER_S)
        with suppress(D3ServeError):  # nobody is left to tell
            if await self.parts.store.callers(job_id) <= 0:
                await self.parts.store.cancel(job_id, self.tenant)


async def _disconnected(request: Request) -> None:
    """Return when the client is gone; the body has been read, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
