"""`/v1/jobs`: submit, list, poll, wait, follow, fetch the result, cancel, retry, erase."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from d3serve.api import bounds
from d3serve.api.auth import Reader, Writer
from d3serve.api.bodies import read_submission
from d3serve.api.dependencies import Parts, TheParts, submit_headers
from d3serve.api.direct_route import DirectRoute
from d3serve.api.events import PING_EVERY_S, EventStream, place_of, stream
from d3serve.api.openapi import PROBLEMS, operation_id, submission_of, tells
from d3serve.api.problems import error_of
from d3serve.api.resources import JSON, asked_text, job_path, job_response, jobs_page, not_modified, timing
from d3serve.api.response_models import JobList, JobResource
from d3serve.api.webhook_checks import check_job_webhook
from d3serve.errors import InvalidRequest, JobExpired, JobNotFinished
from d3serve.schemas import DecisionRequest, DecisionResponse, JobStatus
from d3serve.store.records import JobRecord
from d3serve.text.wording import shown
from d3serve.tracing import say_job


class Page(BaseModel):
    """Which jobs to list, and how many at a time."""

    status: JobStatus | None = None
    model: str | None = Field(default=None, max_length=256)
    created_after: float | None = Field(
        default=None, ge=0, le=1e11, allow_inf_nan=False, description="Seconds since 1970."
    )
    limit: int = Field(default=20, ge=1, le=100)
    cursor: str | None = Field(default=None, max_length=256)


class Poll(BaseModel):
    """How to look at a job."""

    wait: float = Field(
        default=0, ge=0, allow_inf_nan=False, description="Seconds to wait for the job's end."
    )
    include: list[Literal["result", "request"]] = Field(
        default=[],
        max_length=2,
        description="`result`: put the result in; `request`: put in what was asked, while it is kept. Repeatable.",
    )


IfNoneMatch = Annotated[
    str | SkipJsonSchema[None],
    Header(alias="If-None-Match", description="The ETag that the caller has: 304 if the job is still so."),
]
LastEventId = Annotated[
    str | SkipJsonSchema[None],
    Header(
        alias="Last-Event-ID", description="The last event that the caller has: it gets what comes after."
    ),
]
SUBMITTED = ("Location", "Idempotency-Replayed", "Preference-Applied")
router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=PROBLEMS)
submissions = APIRouter(
    prefix="/v1/jobs",
    tags=["jobs"],
    responses=PROBLEMS,
    route_class=DirectRoute,
    generate_unique_id_function=operation_id,
)


@submissions.post(
    "", status_code=202, response_model=JobResource, openapi_extra=submission_of(DecisionRequest),
    responses={
        200: {
            "model": JobResource, "description": "Done within the wait that `Prefer` asked for.", **tells(*SUBMITTED),
        },
        202: tells(*SUBMITTED, "Retry-After"),
    },
)  # fmt: skip
async def submit(request: Request, parts: TheParts, tenant: Writer) -> Response:
    """Take a job. 202 with its address; with `Prefer: wait=N`, 200 and the result if it is done by then."""
    sent = submit_headers(request.headers)
    taken = await parts.intake.take_in(await read_submission(request, parts.settings))
    model, revision = await parts.models.resolve(taken.request.model, taken.request.kinds)
    await check_job_webhook(taken.request.options.webhook, request, parts, tenant)
    submitted = await parts.store.submit(
        replace(taken.request, model=model),
        tenant=tenant,
        idempotency_key=f"/v1/jobs {sent.idempotency_key}" if sent.idempotency_key else None,
        fingerprint=taken.request.fingerprint if sent.idempotency_key else "",
        revision=revision,
        traceparent=sent.traceparent,
    )
    say_job(submitted.job_id)
    if submitted.wake:
        parts.background.wake(submitted.lane)
    job = submitted.job
    headers = {"Location": job_path(submitted.job_id), "Vary": "Prefer"}
    if not submitted.created:
        headers["Idempotency-Replayed"] = "true"
    if sent.respond_async:
        headers["Preference-Applied"] = "respond-async"
    elif sent.wait_s is not None:
        wait_s = min(sent.wait_s, bounds.MAX_WAIT_S)
        headers["Preference-Applied"] = f"wait={wait_s:g}"
        with suppress(JobExpired):  # erased meanwhile; it was taken all the same
            job = await parts.store.wait(submitted.job_id, tenant, wait_s)
            if job.done:
                return job_response(job, result=await _result_if_there(parts, job), headers=headers)
    job = job or await parts.store.get(submitted.job_id, tenant)
    return job_response(job, status=202, headers=headers)


@router.get("", response_model=JobList)
async def list_jobs(
    request: Request,
    parts: TheParts,
    tenant: Reader,
    page: Annotated[Page, Query()],
) -> Response:
    """The caller's jobs, newest first; `metadata[key]=value` filters by metadata."""
    metadata: dict[str, str] = {}
    for name, value in request.query_params.items():
        if name.startswith("metadata[") and name.endswith("]"):
            metadata[name[9:-1]] = value
        elif name not in Page.model_fields:  # ignored, it would answer with all jobs as if they matched
            known = ", ".join(Page.model_fields)
            raise InvalidRequest(
                f"{shown(name)} is no filter; there are {known} and metadata[key]", field=name
            )
    return JSON(
        jobs_page(await parts.store.list_jobs(tenant, metadata=metadata or None, **page.model_dump()))
    )


@router.get(
    "/{job_id}",
    response_model=JobResource,
    responses={
        200: tells("ETag", "Retry-After"),
        304: {"description": "As in `If-None-Match`.", **tells("ETag", "Retry-After")},
    },
)
async def poll(
    job_id: str,
    parts: TheParts,
    tenant: Reader,
    asked: Annotated[Poll, Query()],
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The job now, or as soon as it is done within `wait` seconds. 404 unknown, 410 gone."""
    if asked.wait > bounds.MAX_WAIT_S:
        told = f"wait must be at most {bounds.MAX_WAIT_S:g} s, not {asked.wait:g}"
        raise InvalidRequest(told, field="wait")
    store = parts.store
    job = await (store.wait(job_id, tenant, asked.wait) if asked.wait else store.get(job_id, tenant))
    response = job_response(
        job,
        result=await _result_if_there(parts, job) if "result" in asked.include else None,
        asked=await _asked(parts, job) if "request" in asked.include else None,
    )
    return not_modified(response, if_none_match)


@router.get("/{job_id}/result", response_model=DecisionResponse)
async def result(job_id: str, parts: TheParts, tenant: Reader) -> Response:
    """The bare System One response, which the stock SDK parses. 409 while there is none."""
    try:
        job, text = await parts.store.finished(job_id, tenant)
        return JSON(text, headers=timing(job))
    except JobNotFinished:
        job = await parts.store.get(job_id, tenant)
        if job.error is None:
            raise
        raise error_of(job.error) from None


@router.get(
    "/{job_id}/events",
    response_class=Response,  # EventStream's parent is for routes that yield, which could refuse no longer
    responses={200: {"content": {EventStream.media_type: {"schema": {"type": "string"}}}}},
)
async def events(
    job_id: str, request: Request, parts: TheParts, tenant: Reader, last_event_id: LastEventId = None
) -> Response:
    """Server-sent events until the job is done: queued, started, progress, answer, done."""
    await parts.store.get(job_id, tenant)  # unknown and gone must be told before a stream begins
    request.state.at_end.enter_context(parts.calls.stream(request.state.caller))
    text = stream(
        parts.store.watch(job_id, tenant, PING_EVERY_S),
        lambda: parts.store.result(job_id, tenant),
        place_of(last_event_id),
    )
    return EventStream(text)


@router.post("/{job_id}/cancel", response_model=JobResource, responses={200: tells("Retry-After")})
async def cancel(job_id: str, parts: TheParts, tenant: Writer) -> Response:
    """Cancel a job that waits or runs; one that is done stays as it is, and asking twice does no harm."""
    return job_response(await parts.store.cancel(job_id, tenant))


@router.post(
    "/{job_id}/retry", status_code=202, response_model=JobResource, responses={202: tells("Retry-After")}
)
async def retry(job_id: str, parts: TheParts, tenant: Writer) -> Response:
    """Queue a job that failed, expired or was canceled again, under its id. 409 in any other state."""
    submitted = await parts.store.retry(job_id, tenant)
    if submitted.wake:
        parts.background.wake(submitted.lane)
    return job_response(await parts.store.get(job_id, tenant), status=202)


@router.delete("/{job_id}", status_code=204)
async def delete(job_id: str, parts: TheParts, tenant: Writer) -> Response:
    """Erase a job's input and result; from then on it answers 410. 409 while it runs."""
    await parts.store.delete(job_id, tenant)
    return Response(status_code=204)


async def _asked(parts: Parts, job: JobRecord) -> bytes:
    """What the job was asked, as JSON; of its images and videos what they are."""
    state, questions = await parts.store.asked(job.id)
    return await asyncio.to_thread(asked_text, job, state, questions)


async def _result_if_there(parts: Parts, job: JobRecord) -> bytes | None:
    if job.status != "succeeded":
        return None
    return job.result or await parts.store.result(job.id, job.tenant)
