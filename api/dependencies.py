"""What routes ask for: the process's parts, and who is calling with which preferences."""

import re
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request
from starlette.datastructures import Headers

from d3serve.api.background import Background
from d3serve.api.budget import BodyBudget
from d3serve.api.calls import Calls
from d3serve.api.intake import Intake
from d3serve.api.served import ServedModels
from d3serve.api_keys import KeyRing
from d3serve.errors import InvalidRequest
from d3serve.settings import Settings
from d3serve.store.batches import BatchStore
from d3serve.store.counting import CountDesk
from d3serve.store.jobs import JobStore
from d3serve.tracing import traceparent_here
from d3serve.webhooks.egress import EgressPolicy
from d3serve.webhooks.outbox import HookStore

_KEY: Final = re.compile(r"(?=.*\S)[\x20-\x7e]{1,255}")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_WAIT: Final = re.compile(r"wait\s*=\s*\"?(\d{1,6})\"?", re.IGNORECASE)


@dataclass(frozen=True)
class Parts:
    """What one API process is made of; lives in `app.state.parts` while the app runs."""

    settings: Settings
    store: JobStore
    models: ServedModels
    background: Background
    keys: KeyRing | None
    hooks: HookStore
    egress: EgressPolicy
    calls: Calls
    body_budget: BodyBudget
    intake: Intake
    counts: CountDesk
    batches: BatchStore


async def parts(request: Request) -> Parts:
    """The parts of the process that serves `request`; async, since FastAPI gives other dependencies a thread each."""
    found: Parts = request.app.state.parts
    return found


@dataclass(frozen=True)
class SubmitHeaders:
    """What the headers of a submission say.

    `wait_s` and `respond_async` are RFC 7240's `Prefer`: wait this long for the result, or not at all.
    """

    respond_async: bool
    wait_s: int | None
    idempotency_key: str | None
    traceparent: str | None


def submit_headers(headers: Headers) -> SubmitHeaders:
    """The headers that steer a submission; preferences that we do not know are ignored, as the RFC wants.

    Read by hand: declared to FastAPI, they cost more than all else that a submission is asked. `openapi.py` describes
    them.

    Raises:
        InvalidRequest: the Idempotency-Key is unusable.
    """
    preferred = [part.strip() for line in headers.getlist("prefer") for part in line.split(",")]
    waits = [int(found[1]) for found in map(_WAIT.fullmatch, preferred) if found]
    traceparent = headers.get("traceparent", "")
    return SubmitHeaders(
        respond_async="respond-async" in (one.lower() for one in preferred),
        wait_s=waits[0] if waits else None,
        idempotency_key=_idempotency_key(headers.get("idempotency-key")),
        traceparent=traceparent_here(traceparent if _TRACEPARENT.fullmatch(traceparent) else None),
    )


def _idempotency_key(header: str | None) -> str | None:
    """The key with or without the quotes of a structured field: the draft wants them, clients forget them."""
    if header is None:
        return None
    key = header.strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not _KEY.fullmatch(key):
        raise InvalidRequest(
            "Idempotency-Key must be 1 to 255 printable ASCII characters", field="Idempotency-Key"
        )
    return key


TheParts = Annotated[Parts, Depends(parts)]
