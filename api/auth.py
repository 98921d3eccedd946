"""Who calls, what it may do, and how often: API keys, scopes, rate limits."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request

from d3serve.api.dependencies import Parts, TheParts
from d3serve.api.page_guard import refuse_web_pages
from d3serve.api_keys import ALL_SCOPES, PUBLIC_TENANT, Scope
from d3serve.errors import Forbidden, RateLimited, Unauthorized

WINDOW_S: Final = 60


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request; a caller without a key is `public` and may do everything."""

    tenant: str
    key_id: str
    scopes: frozenset[Scope]
    requests_per_minute: int | None


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
        refuse_web_pages(request, parts.settings)
        return Caller(PUBLIC_TENANT, "", frozenset(ALL_SCOPES), None)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized("an API key is needed: send it as `Authorization: Bearer <key>`")
    found = parts.keys.identify(key.strip())
    rate = found.requests_per_minute or parts.settings.requests_per_minute
    return Caller(found.tenant, found.id, frozenset(found.scopes), rate)


def requires(scope: Scope) -> Callable[[Request, TheParts], Awaitable[str]]:
    """A dependency that admits callers with `scope`, within their rate, and gives their tenant."""

    async def admit(request: Request, parts: TheParts) -> str:
        caller = _identify(request, parts)
        request.state.key_id = caller.key_id
        request.state.scopes = caller.scopes
        if scope not in caller.scopes:
            raise Forbidden(f"this API key lacks the scope {scope}")
        if caller.requests_per_minute is not None:
            count, left_s = await parts.store.count_request(caller.key_id, WINDOW_S)
            remaining, resets = max(0, caller.requests_per_minute - count), math.ceil(left_s)
            request.state.allowance = Allowance(caller.requests_per_minute, remaining, resets)
            if count > caller.requests_per_minute:
                raise RateLimited(
                    f"more than {caller.requests_per_minute} requests a minute",
                    details={"retry_after_s": resets},
                )
        return caller.tenant

    return admit


Reader = Annotated[str, Depends(requires("jobs:read"))]
Writer = Annotated[str, Depends(requires("jobs:write"))]
HookOwner = Annotated[str, Depends(requires("webhooks"))]
Admin = Annotated[str, Depends(requires("admin"))]
