"""Who calls, what it may do, and how often: API keys, scopes, rate limits."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request

from d3serve.api.budget import BodyBytes
from d3serve.api.dependencies import Parts, TheParts
from d3serve.api_keys import ALL_SCOPES, PUBLIC_TENANT, ApiKey, Scope
from d3serve.errors import Forbidden, RateLimited, Unauthorized

WINDOW_S: Final = 60


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request; a caller without a key is `public` and may do everything.

    `name` tells callers apart: by key, or by address where there are none.
    """

    name: str
    tenant: str
    scopes: frozenset[Scope]
    requests_per_minute: int | None
    key: ApiKey | None = None


@dataclass(frozen=True)
class Allowance:
    """What is left of a caller's requests in this minute."""

    limit: int
    remaining: int
    resets_in_s: int

    def headers(self) -> dict[str, str]:
        """The RateLimit pair of the IETF draft."""
        return {
            "RateLimit-Policy": f'"default";q={self.limit};w={WINDOW_S}',
            "RateLimit": f'"default";r={self.remaining};t={self.resets_in_s}',
        }


def _identify(request: Request, parts: Parts) -> Caller:
    if parts.keys is None:
        address = request.client.host if request.client else ""
        return Caller(address, PUBLIC_TENANT, frozenset(ALL_SCOPES), None)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized("an API key is needed: send it as `Authorization: Bearer <key>`")
    found = parts.keys.identify(key.strip())
    rate = found.requests_per_minute or parts.settings.requests_per_minute
    return Caller(found.id, found.tenant, frozenset(found.scopes), rate, found)


def requires(scope: Scope) -> Callable[[Request, TheParts], Awaitable[str]]:
    """A dependency that admits callers with `scope`, within their rate, and gives their tenant."""

    async def admit(request: Request, parts: TheParts) -> str:
        caller = _identify(request, parts)
        request.state.key_id = caller.key.id if caller.key else ""
        request.state.scopes = caller.scopes
        if scope not in caller.scopes:
            raise Forbidden(f"this API key lacks the scope {scope}")
        if caller.requests_per_minute is not None:
            count, left_s = await parts.store.count_request(caller.name, WINDOW_S)
            remaining, resets = max(0, caller.requests_per_minute - count), math.ceil(left_s)
            request.state.allowance = Allowance(caller.requests_per_minute, remaining, resets)
            if count > caller.requests_per_minute:
                raise RateLimited(
                    f"more than {caller.requests_per_minute} requests a minute",
                    details={"retry_after_s": resets},
                )
        _begin(request, parts, caller)
        return caller.tenant

    return admit


def _begin(request: Request, parts: Parts, caller: Caller) -> None:
    """Count the request in as one that is under way, until its answer has been sent.

    Raises:
        RateLimited: the caller has as many as one may have.
    """
    state = request.state
    state.caller = caller.name
    state.call = state.at_end.enter_context(parts.calls.call(caller.name, caller.key))
    state.body_bytes = BodyBytes(parts.body_budget, caller.name)
    state.at_end.callback(state.body_bytes.give_back)


Reader = Annotated[str, Depends(requires("jobs:read"))]
Writer = Annotated[str, Depends(requires("jobs:write"))]
HookOwner = Annotated[str, Depends(requires("webhooks"))]
Admin = Annotated[str, Depends(requires("admin"))]
