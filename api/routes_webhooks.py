"""Webhook endpoints and the delivery log."""

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from d3serve.api.auth import HookOwner
from d3serve.api.bodies import read_object
from d3serve.api.dependencies import TheParts
from d3serve.api.openapi import PROBLEMS, body_of, tells
from d3serve.api.resources import JSON
from d3serve.api.response_models import (
    DeliveryList,
    DeliveryResource,
    EndpointList,
    EndpointResource,
    EndpointWithSecret,
    WebhookSecret,
)
from d3serve.api.webhook_checks import (
    EndpointRequest,
    check_endpoint,
    count_sending,
    delivery_resource,
    endpoint_resource,
)
from d3serve.webhooks.outbox import DeliveryState

router = APIRouter(tags=["webhooks"], responses=PROBLEMS)
ENDPOINTS, DELIVERIES = "/v1/webhook-endpoints", "/v1/webhook-deliveries"


@router.post(
    ENDPOINTS, status_code=201, openapi_extra=body_of(EndpointRequest), response_model=EndpointWithSecret,
    responses={201: tells("Location")},
)  # fmt: skip
async def add_endpoint(request: Request, parts: TheParts, tenant: HookOwner) -> Response:
    """Register a receiver; the answer is the only one that shows its secret."""
    payload = await read_object(request, parts.settings)
    asked = check_endpoint(payload, parts.egress)
    endpoint = await parts.hooks.add_endpoint(tenant, asked.url, asked.events)
    headers = {"Location": f"{ENDPOINTS}/{endpoint.id}"}
    return JSON(endpoint_resource(endpoint, with_secret=True), 201, headers)


@router.get(ENDPOINTS, response_model=EndpointList)
async def list_endpoints(parts: TheParts, tenant: HookOwner) -> Response:
    """The caller's receivers."""
    endpoints = await parts.hooks.endpoints(tenant)
    return JSON({"object": "list", "data": [endpoint_resource(endpoint) for endpoint in endpoints]})


@router.get(ENDPOINTS + "/{endpoint_id}", response_model=EndpointResource)
async def get_endpoint(endpoint_id: str, parts: TheParts, tenant: HookOwner) -> Response:
    """One receiver; `disabled_reason` says why it gets nothing any more."""
    return JSON(endpoint_resource(await parts.hooks.endpoint(tenant, endpoint_id)))


@router.put(
    ENDPOINTS + "/{endpoint_id}", openapi_extra=body_of(EndpointRequest), response_model=EndpointResource
)
async def change_endpoint(endpoint_id: str, request: Request, parts: TheParts, tenant: HookOwner) -> Response:
    """Change address and events, and enable it again; the secret stays."""
    endpoint = await parts.hooks.endpoint(tenant, endpoint_id)
    payload = await read_object(request, parts.settings)
    asked = check_endpoint(payload, parts.egress)
    changed = replace(endpoint, url=asked.url, events=tuple(asked.events), disabled_reason=None)
    return JSON(endpoint_resource(await parts.hooks.save_endpoint(changed)))


@router.delete(ENDPOINTS + "/{endpoint_id}", status_code=204)
async def delete_endpoint(endpoint_id: str, parts: TheParts, tenant: HookOwner) -> Response:
    """Remove a receiver; what is still due for it is dropped."""
    await parts.hooks.delete_endpoint(tenant, endpoint_id)
    return Response(status_code=204)


@router.post(ENDPOINTS + "/{endpoint_id}/rotate-secret", response_model=EndpointWithSecret)
async def rotate_secret(endpoint_id: str, parts: TheParts, tenant: HookOwner) -> Response:
    """Make a new secret, shown here once; for a day deliveries carry a signature of the old one too."""
    return JSON(endpoint_resource(await parts.hooks.rotate_secret(tenant, endpoint_id), with_secret=True))


@router.post(ENDPOINTS + "/{endpoint_id}/test", status_code=202, response_model=DeliveryResource)
async def send_test(endpoint_id: str, parts: TheParts, tenant: HookOwner) -> Response:
    """Send a `webhook.test` event, signed like any other; the delivery log tells what became of it."""
    endpoint = await parts.hooks.endpoint(tenant, endpoint_id)
    await count_sending(parts, tenant)
    delivery = await parts.hooks.open_delivery(tenant, "webhook.test", endpoint.url, endpoint.id, "{}")
    return JSON(delivery_resource(delivery), 202)


@router.get("/v1/webhook-secret", response_model=WebhookSecret)
async def webhook_secret(parts: TheParts, tenant: HookOwner) -> Response:
    """The secret that signs deliveries to the URLs that jobs name themselves."""
    return JSON({"object": "webhook.secret", "secret": await parts.hooks.tenant_secret(tenant)})


@router.get(DELIVERIES, response_model=DeliveryList)
async def list_deliveries(
    parts: TheParts,
    tenant: HookOwner,
    job_id: str | None = None,
    state: DeliveryState | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    """Deliveries, newest first, for seven days after the last attempt: every attempt, and why it did not count."""
    found = await parts.hooks.deliveries(tenant, job_id=job_id, state=state, limit=limit)
    return JSON({"object": "list", "data": [delivery_resource(delivery) for delivery in found]})


@router.post(DELIVERIES + "/{delivery_id}/redeliver", status_code=202, response_model=DeliveryResource)
async def redeliver(delivery_id: str, parts: TheParts, tenant: HookOwner) -> Response:
    """Send an event again that no receiver has taken: the same id and bytes, a schedule begun anew."""
    await count_sending(parts, tenant)
    return JSON(delivery_resource(await parts.hooks.redeliver(delivery_id, tenant)), 202)
