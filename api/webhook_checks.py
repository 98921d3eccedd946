"""What the API checks and shows of webhooks; sending them is the business of a process of its own."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from fastapi import Request
from pydantic import Field, TypeAdapter

from d3serve.api.dependencies import Parts
from d3serve.api.validation import Findings, check_body
from d3serve.errors import Forbidden, InvalidRequest, NotFound, QueueFull, RateLimited
from d3serve.schemas import JobEvent, WebhookTarget
from d3serve.schemas.questions import Wire
from d3serve.webhooks.egress import EgressPolicy
from d3serve.webhooks.outbox import MAX_OPEN_BYTES, Delivery, Endpoint


class EndpointRequest(Wire):
    """A receiver to register; `events` empty means all."""

    url: str = Field(max_length=2048)
    events: list[JobEvent] = Field(default_factory=list, max_length=4)


_ENDPOINT = TypeAdapter(EndpointRequest)
WINDOW_S: Final = 60
SENDINGS_PER_MINUTE: Final = 60  # nobody has shown that the receiver is the caller's


def check_endpoint(payload: Mapping[str, Any], policy: EgressPolicy) -> EndpointRequest:
    """The registration in a body.

    Raises:
        InvalidRequest: not one, or its URL leads where webhooks may not go.
    """
    asked = check_body(_ENDPOINT, payload)
    check_target_url(asked.url, policy, field="url")
    return asked


def check_target_url(url: str, policy: EgressPolicy, *, field: str) -> None:
    """Refuse now what the URL's text shows. A name is looked up at each try and not here: it may resolve later.

    Raises:
        InvalidRequest: says what is wrong with the URL.
    """
    try:
        policy.check_url(url)
    except InvalidRequest as error:
        findings = Findings()
        findings.add("invalid_request", tuple(field.split(".")), error.message)
        findings.raise_if_any()


async def check_job_webhook(
    webhook: WebhookTarget | None, request: Request, parts: Parts, tenant: str
) -> None:
    """Refuse a job whose events could never be delivered, or may not be on this caller's word.

    Raises:
        Forbidden: the caller's key may not use webhooks.
        InvalidRequest: its URL leads nowhere allowed, or the tenant has no such endpoint.
        QueueFull: too much that this tenant's receivers have not taken is waiting already.
    """
    if webhook is None:
        return
    if "webhooks" not in request.state.scopes:
        raise Forbidden(
            "this API key lacks the scope webhooks, so its jobs can name none", field="job.webhook"
        )
    if await parts.hooks.open_bytes(tenant) >= MAX_OPEN_BYTES:
        raise QueueFull(
            f"{MAX_OPEN_BYTES // 2**20} MiB of webhook events wait for receivers that do not take them",
            field="job.webhook",
            details={"retry_after_s": 60},
        )
    if webhook.url is not None:
        check_target_url(webhook.url, parts.egress, field="job.webhook.url")
        return
    try:
        await parts.hooks.endpoint(tenant, str(webhook.endpoint_id))
    except NotFound as error:
        findings = Findings()
        findings.add("invalid_request", ("job", "webhook", "endpoint_id"), f"names {error.message}")
        findings.raise_if_any()


async def count_sending(parts: Parts, tenant: str) -> None:
    """Count a delivery that a caller asks for; jobs and failed tries have limits of their own.

    Raises:
        RateLimited: the tenant has asked for more in this minute than it may.
    """
    count, left_s = await parts.store.count_request(f"sending {tenant}", WINDOW_S)
    if count > SENDINGS_PER_MINUTE:
        raise RateLimited(
            f"more than {SENDINGS_PER_MINUTE} tests and redeliveries a minute",
            details={"retry_after_s": math.ceil(left_s)},
        )


def endpoint_resource(endpoint: Endpoint, *, with_secret: bool = False) -> dict[str, Any]:
    """An endpoint on the wire; its secret only where it has just been made."""
    shown: dict[str, Any] = {
        "id": endpoint.id,
        "object": "webhook.endpoint",
        "url": endpoint.url,
        "events": list(endpoint.events),
        "created_at": endpoint.created_at,
        "disabled_reason": endpoint.disabled_reason,
    }
    return shown | ({"secret": endpoint.secrets[0][0]} if with_secret else {})


def delivery_resource(delivery: Delivery) -> dict[str, Any]:
    """A delivery on the wire: every attempt with its reason, but not the body, which holds answers."""
    shown = {
        name: value
        for name, value in asdict(delivery).items()
        if name not in ("tenant", "data", "schedule_from")
    }
    return {"object": "webhook.delivery", **shown}
