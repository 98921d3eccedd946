"""A route that is called without FastAPI's search for what its function asks for."""

from inspect import signature
from typing import Any, Final, get_args

from fastapi import Request, Response
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes
from starlette.types import Receive, Scope, Send

ASKED_FOR: Final = ("request", "parts", "tenant")


class DirectRoute(APIRoute):
    """A route whose function asks for `(request, parts, tenant)`, and nothing else, and gets just that.

    FastAPI describes it like any other. At each request it would also look, for each of the three, for values in path,
    query, headers, cookies and body, and open two stacks for what might be closed later: an eighth of a submission.

    Raises:
        TypeError: the function asks for something else.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        asked = signature(self.endpoint).parameters
        if tuple(asked) != ASKED_FOR:
            raise TypeError(f"{self.name} asks for {', '.join(asked)}, not for {', '.join(ASKED_FOR)}")
        _, self._admission = get_args(asked["tenant"].annotation)
        self._wanted = SecurityScopes(list(self._admission.scopes))
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        tenant = await self._admission.dependency(request, self._wanted)
        response: Response = await self.endpoint(request, request.app.state.parts, tenant)
        await response(scope, receive, send)
