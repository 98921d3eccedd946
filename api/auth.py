"""Who calls, what it may do, and how often: API keys, scopes, rate limits."""

import math
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes

from d3serve.api.budget import BodyBytes
from d3serve.api.dependencies import Parts, TheParts
from d3serve.api_keys import ALL_SCOPES, PUBLIC_TENANT, ApiKey, Scope
from d3serve.errors import Forbidden, RateLimited, Unauthorized

WINDOW_S: Final = 60
_BEARER: Final = HTTPBearer(
    auto_error=False,  # its refusal is none of ours
    scheme_name="ApiKey",
    description="Where the server has API keys: one that `d3serve new-key` printed.",
)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]


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


def _identify(request: Request, parts: Parts, sent: HTTPAuthorizationCredentials | None) -> Caller:
    if parts.keys is None:
        address = request.client.host if request.client else ""
        return Caller(address, PUBLIC_TENANT, frozenset(ALL_SCOPES), None)
    if sent is None:
        raise Unauthorized("an API key is needed: send it as `Authorization: Bearer <key>`")
    found = parts.keys.identify(sent.credentials)
    rate = found.requests_per_minute or parts.settings.requests_per_minute
    return Caller(found.id, found.tenant, frozenset(found.scopes), rate, found)


async def admit(request: Request, parts: TheParts, sent: Credentials, wanted: SecurityScopes) -> str:
    """Admit callers with the scopes of the route, within their rate; their tenant."""
    caller = _identify(request, parts, sent)
    request.state.key_id = caller.key.id if caller.key else ""
    request.state.scopes = caller.scopes
    for scope in wanted.scopes:
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


Reader = Annotated[str, Security(admit, scopes=["jobs:read"])]
Writer = Annotated[str, Security(admit, scopes=["jobs:write"])]
HookOwner = Annotated[str, Security(admit, scopes=["webhooks"])]
Admin = Annotated[str, Security(admit, scopes=["admin"])]
