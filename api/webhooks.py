"""What the API checks and shows of webhooks; sending them is the business of a process of its own."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import Field, TypeAdapter

from d3serve.api.dependencies import Parts
from d3serve.api.validation import Findings, check_body
from d3serve.egress import EgressPolicy
from d3serve.errors import InvalidRequest, NotFound
from d3serve.schemas import JobEvent, WebhookTarget, Wire
from d3serve.store.hooks import Delivery, Endpoint


class EndpointRequest(Wire):
    """A receiver to register; `events` empty means all."""

    url: str = Field(max_length=2048)
    events: list[JobEvent] = Field(default_factory=list, max_length=4)


_ENDPOINT = TypeAdapter(EndpointRequest)


async def check_endpoint(payload: Mapping[str, Any], policy: EgressPolicy) -> EndpointRequest:
    """The registration in a body.

    Raises:
        InvalidRequest: not one, or its URL leads where webhooks may not go.
    """
    asked = check_body(_ENDPOINT, payload)
    await check_target_url(asked.url, policy, field="url")
    return asked


async def check_target_url(url: str, policy: EgressPolicy, *, field: str) -> None:
    """Refuse now what the sender would refuse at every try; a name that does not resolve may do so later.

    Raises:
        InvalidRequest: says what is wrong with the URL.
    """
    try:
        parts = policy.check_url(url)
        await policy.resolve(str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80))
    except InvalidRequest as error:
        findings = Findings()
        findings.add("invalid_request", tuple(field.split(".")), error.message)
        findings.raise_if_any()
    except OSError:
        return


async def check_job_webhook(webhook: WebhookTarget | None, parts: Parts, tenant: str) -> None:
    """Refuse a job whose events could never be delivered.

    Raises:
        InvalidRequest: its URL leads nowhere allowed, or the tenant has no such endpoint.
    """
    if webhook is None:
        return
    if webhook.url is not None:
        await check_target_url(webhook.url, parts.egress, field="job.webhook.url")
        return
    try:
        await parts.hooks.endpoint(tenant, str(webhook.endpoint_id))
    except NotFound as error:
        findings = Findings()
        findings.add("invalid_request", ("job", "webhook", "endpoint_id"), f"names {error.message}")
        findings.raise_if_any()


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
        if name not in ("tenant", "body", "schedule_from")
    }
    return {"object": "webhook.delivery", **shown}
