"""`/v1/systemone` and `/v1/decisions`: synchronous answers, each a job underneath."""

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from d3serve.api.auth import Writer
from d3serve.api.bodies import read_submission
from d3serve.api.dependencies import TheParts, submit_headers
from d3serve.api.dialect import from_system_one
from d3serve.api.direct_route import DirectRoute
from d3serve.api.openai_models import OpenAIDecision, OpenAIDecisionRequest
from d3serve.api.openapi import PROBLEMS, operation_id, submission_of, tells
from d3serve.api.resources import JSON, job_path, job_response, timing
from d3serve.api.response_models import JobResource
from d3serve.api.synchronous import SynchronousCall
from d3serve.schemas import DecisionRequest, DecisionResponse

router = APIRouter(
    tags=["decisions"],
    responses=PROBLEMS,
    route_class=DirectRoute,
    generate_unique_id_function=operation_id,
)
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: tells("Location", "Idempotency-Replayed"),
    202: {
        "model": JobResource,
        "description": "With `Prefer: respond-async`: the job, to be polled.",
        **tells("Location", "Preference-Applied", "Retry-After"),
    },
}


@router.post(
    "/v1/systemone",
    openapi_extra=submission_of(DecisionRequest),
    response_model=DecisionResponse,
    responses=RESPONSES,
)
async def system_one(request: Request, parts: TheParts, tenant: Writer) -> Response:
    """Answer now. A call that takes longer than the SDK waits ends with 504 `still_running`: send it again."""
    sent = submit_headers(request.headers)
    taken = await parts.intake.take_in(await read_submission(request, parts.settings))
    return await _respond(await SynchronousCall.make(request, parts, tenant, taken, sent))


@router.post(
    "/v1/decisions",
    openapi_extra=submission_of(OpenAIDecisionRequest, DecisionRequest),
    response_model=OpenAIDecision | DecisionResponse,
    responses=RESPONSES,
)
async def decisions(request: Request, parts: TheParts, tenant: Writer) -> Response:
    """Answer now, in the dialect asked in: OpenAI's if the body says `input`, System One's if `state`."""
    sent = submit_headers(request.headers)
    taken = await parts.intake.take_in(await read_submission(request, parts.settings), any_dialect=True)
    return await _respond(await SynchronousCall.make(request, parts, tenant, taken, sent))


async def _respond(call: SynchronousCall) -> Response:
    submitted = await call.submit()
    if call.sent.respond_async:
        headers = {
            "Location": job_path(submitted.job_id),
            "Preference-Applied": "respond-async",
            "Vary": "Prefer",
        }
        job = await call.parts.store.get(submitted.job_id, call.tenant)
        return job_response(job, status=202, headers=headers)
    answered = await call.answer(submitted.job_id)
    headers = {"Location": job_path(answered.job.id), **timing(answered.job)}
    if not submitted.created:
        headers["Idempotency-Replayed"] = "true"
    if call.names is None:
        return JSON(answered.response, headers=headers)
    response = from_system_one(call.names, json.loads(answered.response), answered.job.id)
    return JSON(response, headers=headers)
