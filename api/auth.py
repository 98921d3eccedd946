"""Who calls, what it may do, and how often: API keys, scopes, rate limits."""

import math
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Request, Security
from fastapi.openapi.models import HTTPBearer
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param

from d3serve.api.budget import BodyBytes
from d3serve.api.dependencies import Parts
from d3serve.api_keys import ALL_SCOPES, PUBLIC_TENANT, ApiKey, Scope
from d3serve.errors import Forbidden, RateLimited, Unauthorized

WINDOW_S: Final = 60
ALL: Final = frozenset(ALL_SCOPES)


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


class Admission(SecurityBase):
    """Admits callers with the scopes of a route, within their rate; gives the route their tenant.

    One dependency, and not three that need each other: FastAPI takes as long for each as the rest of it does.
    """

    scheme_name = "ApiKey"
    model = HTTPBearer(description="Where the server has API keys: one that `d3serve new-key` printed.")

    async def __call__(self, request: Request, wanted: SecurityScopes) -> str:
        """The caller's tenant.

        Raises:
            Unauthorized: the key is missing, or none of ours.
            Forbidden: it lacks a scope.
            RateLimited: it came too often, or has too much under way.
        """
        parts: Parts = request.app.state.parts
        caller = _identify(request, parts)
        request.state.key_id = caller.key.id if caller.key else ""
        request.state.scopes = caller.scopes
        for scope in wanted.scopes:
            if scope not in caller.scopes:
                raise Forbidden(f"this API key lacks the scope {scope}")
        if caller.requests_per_minute is not None:
            await _count(request, parts, caller.name, caller.requests_per_minute)
        _begin(request, parts, caller)
        return caller.tenant


def _identify(request: Request, parts: Parts) -> Caller:
    if parts.keys is None:
        address = request.client.host if request.client else ""
        return Caller(address, PUBLIC_TENANT, ALL, None)
    scheme, key = get_authorization_scheme_param(request.headers.get("authorization"))
    if scheme.lower() != "bearer" or not key:
        raise Unauthorized("an API key is needed: send it as `Authorization: Bearer <key>`")
    found = parts.keys.identify(key)
    rate = found.requests_per_minute or parts.settings.requests_per_minute
    return Caller(found.id, found.tenant, frozenset(found.scopes), rate, found)


async def _count(request: Request, parts: Parts, caller: str, allowed: int) -> None:
    """Count the request, and tell the caller what is left.

    Raises:
        RateLimited: nothing is.
    """
    count, left_s = await parts.store.count_request(caller, WINDOW_S)
    resets = math.ceil(left_s)
    request.state.allowance = Allowance(allowed, max(0, allowed - count), resets)
    if count > allowed:
        raise RateLimited(f"more than {allowed} requests a minute", details={"retry_after_s": resets})


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


_admitted: Final = Admission()
Reader = Annotated[str, Security(_admitted, scopes=["jobs:read"])]
Writer = Annotated[str, Security(_admitted, scopes=["jobs:write"])]
HookOwner = Annotated[str, Security(_admitted, scopes=["webhooks"])]
Admin = Annotated[str, Security(_admitted, scopes=["admin"])]
