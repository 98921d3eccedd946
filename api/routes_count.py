"""`POST /v1/count`: what a job would read, whether it would be taken, and how long it would take; none is made."""

from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Request, Response

from d3serve.api.auth import Writer
from d3serve.api.bodies import read_submission
from d3serve.api.dependencies import TheParts
from d3serve.api.openapi import PROBLEMS, body_of
from d3serve.api.resources import JSON
from d3serve.api.response_models import CountResource
from d3serve.schemas import DecisionRequest, Lane
from d3serve.settings import Settings
from d3serve.store.encode import choose_lane
from d3serve.tracing import traceparent_here

router = APIRouter(prefix="/v1/count", tags=["jobs"], responses=PROBLEMS)


@router.post("", response_model=CountResource, openapi_extra=body_of(DecisionRequest))
async def count(request: Request, parts: TheParts, tenant: Writer) -> Response:
    """Count the tokens of a request that is sent as a job's would be; a worker counts, and no GPU is used."""
    taken = await parts.intake.take_in(await read_submission(request, parts.settings))
    model, revision = await parts.models.resolve(taken.request.model, taken.request.kinds)
    asked, lane = replace(taken.request, model=model), choose_lane(parts.settings, taken.request)
    here = traceparent_here(None)
    found = await parts.counts.count(asked, tenant=tenant, revision=revision, traceparent=here)
    tokens = found.total_tokens
    estimate = None if tokens is None else await parts.counts.estimate(lane, tenant, tokens)
    told = found.model_dump(exclude={"refused"}) | {
        "object": "decision.count",
        "lane": lane,
        "fits": not found.refused,
        "refused": [refusal.model_dump(exclude_none=True) for refusal in found.refused],
        "limits": _limits(parts.settings, taken.request.options.lane),
        "estimate": asdict(estimate) if estimate else None,
    }
    return JSON(told)


def _limits(settings: Settings, asked: Lane | None) -> dict[str, Any]:
    """Whoever asks for no lane gets the one that is long enough."""
    if asked == "interactive":
        return {"prompt": settings.max_interactive_tokens, "job": settings.max_job_tokens_interactive}
    return {"prompt": settings.max_offline_tokens, "job": settings.max_job_tokens_offline}
