"""`/v1/jobs`: submit, poll, wait, fetch the result, cancel."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from d3serve.api.bodies import read_object
from d3serve.api.dependencies import Parts, Tenant, TheParts, TheSubmitHeaders, fingerprint
from d3serve.api.openapi import DECISION_BODY, PROBLEMS
from d3serve.api.problems import error_of
from d3serve.api.resources import JSON, job_path, job_response
from d3serve.api.validation import check_request
from d3serve.errors import InvalidRequest, JobNotFinished
from d3serve.schemas import DecisionResponse, JobResource
from d3serve.store.records import JobRecord

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=PROBLEMS)


@router.post(
    "", status_code=202, response_model=JobResource, openapi_extra=DECISION_BODY,
    responses={200: {"model": JobResource, "description": "Done within the wait that `Prefer` asked for."}},
)  # fmt: skip
async def submit(request: Request, parts: TheParts, tenant: Tenant, sent: TheSubmitHeaders) -> Response:
    """Take a job. 202 with its address; with `Prefer: wait=N`, 200 and the result if it is done by then."""
    _, payload = await read_object(request, parts.settings)
    decision = check_request(payload, parts.settings)
    decision = decision.model_copy(update={"model": await parts.models.resolve(decision.model)})
    submitted = await parts.store.submit(
        decision,
        tenant=tenant,
        idempotency_key=sent.idempotency_key,
        fingerprint=fingerprint(payload) if sent.idempotency_key else "",
        traceparent=sent.traceparent,
    )
    if submitted.wake:
        parts.background.start(parts.store.send_wake(submitted.lane))
    headers = {"Location": job_path(submitted.job_id), "Vary": "Prefer"}
    if not submitted.created:
        headers["Idempotency-Replayed"] = "true"
    if sent.respond_async:
        headers["Preference-Applied"] = "respond-async"
    elif sent.wait_s is not None:
        wait_s = min(sent.wait_s, parts.settings.max_wait_s)
        headers["Preference-Applied"] = f"wait={wait_s:g}"
        job = await parts.store.wait(submitted.job_id, tenant, wait_s)
        if job.done:
            return job_response(job, result=await _result_if_there(parts, job), headers=headers)
    job = await parts.store.get(submitted.job_id, tenant)
    return job_response(job, status=202, headers=headers)


@router.get("/{job_id}", response_model=JobResource)
async def poll(
    job_id: str,
    parts: TheParts,
    tenant: Tenant,
    wait: Annotated[float, Query(ge=0, description="Seconds to wait for the job to be done.")] = 0,
    include: Annotated[Literal["result"] | None, Query(description="`result`: put the result in.")] = None,
) -> Response:
    """The job now, or as soon as it is done within `wait` seconds. 404 unknown, 410 gone."""
    if wait > parts.settings.max_wait_s:
        raise InvalidRequest(
            f"wait must be at most {parts.settings.max_wait_s:g} s, not {wait:g}", field="wait"
        )
    job = await (parts.store.wait(job_id, tenant, wait) if wait else parts.store.get(job_id, tenant))
    return job_response(job, result=await _result_if_there(parts, job) if include else None)


@router.get("/{job_id}/result", response_model=DecisionResponse)
async def result(job_id: str, parts: TheParts, tenant: Tenant) -> Response:
    """The bare System One response, which the stock SDK parses. 409 while there is none."""
    try:
        return JSON(await parts.store.result(job_id, tenant))
    except JobNotFinished:
        job = await parts.store.get(job_id, tenant)
        if job.error is None:
            raise
        raise error_of(job.error) from None


@router.post("/{job_id}/cancel", response_model=JobResource)
async def cancel(job_id: str, parts: TheParts, tenant: Tenant) -> Response:
    """Cancel a job that waits or runs; one that is done stays as it is, and asking twice does no harm."""
    return job_response(await parts.store.cancel(job_id, tenant))


async def _result_if_there(parts: Parts, job: JobRecord) -> bytes | None:
    return await parts.store.result(job.id, job.tenant) if job.status == "succeeded" else None
