"""What every request gets, whatever route it meets: an id, timing, a log line, a count, no bare 500."""

import asyncio
import contextlib
import errno
import re
import secrets
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from d3serve.api.heads import check_head
from d3serve.api.problems import problem_response
from d3serve.errors import D3ServeError, InternalError, Overloaded, ShuttingDown

log = structlog.get_logger("d3serve.api")
_USABLE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
QUIET: Final = frozenset({"/healthz", "/readyz", "/metrics"})  # probes: counted, neither logged nor traced


class HTTPMetrics:
    """Counts and latencies of this process, by route template (never by raw path: that has no bound)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "route", "status")
        self.requests = Counter("d3serve_http_requests", "HTTP responses sent.", labels, registry=registry)
        self.seconds = Histogram(
            "d3serve_http_request_duration_seconds", "From the first byte in to the last byte out.",
            ("method", "route"), registry=registry,
        )  # fmt: skip


class Edge:
    """ASGI middleware, outermost. It logs method, path template and status: no body, no query, no key."""

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics, admit: Callable[[Headers], None]) -> None:
        """`admit` raises for a request that gets nothing from any route."""
        self.app = app
        self.metrics = metrics
        self.admit = admit
        self._log = log.bind()  # else it is bound for every request, also where nothing is logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; whatever ends it early becomes the one error body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = Exchange(scope, send, _request_id(headers.get("x-request-id")))
        with contextlib.ExitStack() as at_end:
            exchange.scope["state"]["at_end"] = at_end
            try:
                check_head(scope)
                self.admit(headers)
                await self.app(exchange.scope, receive, exchange.send)
            except ClientDisconnect:
                exchange.status = exchange.status or 499
            except (Exception, asyncio.CancelledError) as error:
                await exchange.end_with(error, receive)
            finally:
                self._account(scope["method"], exchange)

    def _account(self, method: str, exchange: "Exchange") -> None:
        seconds = time.perf_counter() - exchange.began
        route = getattr(exchange.scope.get("route"), "path", "(none)")
        self.metrics.requests.labels(method if route != "(none)" else "(any)", route, exchange.status).inc()
        self.metrics.seconds.labels(method if route != "(none)" else "(any)", route).observe(seconds)
        if route not in QUIET:
            self._log.info(
                "request", request_id=exchange.request_id, method=method, route=route, status=exchange.status,
                duration_ms=round(seconds * 1000, 1), key=exchange.scope["state"].get("key_id"),
            )  # fmt: skip


class Exchange:
    """One request and its answer: a HEAD is a GET whose answer has no body, and an end that nobody planned is told."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.scope = {**scope, "state": {**scope.get("state", {}), "request_id": request_id}}
        self.request_id = request_id
        self.began = time.perf_counter()
        self.status = 0
        self._send = send
        self._length_told = self._complete = False
        self._head_only = scope["method"] == "HEAD"
        if self._head_only:
            self.scope["method"] = "GET"

    async def send(self, message: Message) -> None:
        """Pass on what the application says, with the headers that every answer has."""
        if self._complete:
            return  # the body of an answer to HEAD
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": self._with_headers(message["headers"])}
            await self._send(message)
            if self._head_only:
                message = {"type": "http.response.body"}  # at once: a stream's body might never come
            else:
                return
        self._complete = not message.get("more_body", False)
        await self._send(message)

    def _with_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        told = {name for name, _ in headers}
        request_id, spent_ms = self.request_id.encode(), (time.perf_counter() - self.began) * 1000
        ours = [
            (b"x-request-id", request_id),
            (b"x-typesafe-request-id", request_id),
            (b"server-timing", b"total;dur=%.1f" % spent_ms),
        ]
        if b"cache-control" not in told:
            ours.append((b"cache-control", b"no-store"))  # else a 404 or 410 may be kept, and a secret
        if allowance := self.scope["state"].get("allowance"):
            ours += [(name.lower().encode(), value.encode()) for name, value in allowance.headers().items()]
        self._length_told = b"content-length" in told
        return [*headers, *ours]

    async def end_with(self, error: BaseException, receive: Receive) -> None:
        """Answer with `error`, or end the stream that has begun.

        Raises:
            BaseException: `error`, if an answer has begun that cannot end well.
        """
        known = self._known(error)
        if known is None:
            # Frames and type only: the text of an unforeseen exception may quote the request.
            trace = "".join(traceback.format_tb(error.__traceback__))
            log.error("unforeseen", request_id=self.request_id, kind=type(error).__name__, trace=trace)
        if not self.status:
            response = problem_response(
                known or InternalError("something broke on our side; the request id helps to find it"),
                instance=self.scope["path"],
                request_id=self.request_id,
                headers={"Connection": "close"},  # what follows such a request may be a part of it
            )
            await response(self.scope, receive, self.send)
        elif known is None or self._length_told:
            raise error
        else:
            await self.send({"type": "http.response.body"})

    def _known(self, error: BaseException) -> D3ServeError | None:
        """What to tell of it; None for what nobody foresaw."""
        call = self.scope["state"].get("call")
        ended_by = call and call.close()
        match error:
            case D3ServeError():
                return error
            case asyncio.CancelledError():  # its key is gone, or the time is up that a stopping process leaves it
                return ended_by or ShuttingDown("the service is stopping; ask again")
            case OSError(errno=errno.EMFILE | errno.ENFILE):
                log.error("out_of_descriptors", request_id=self.request_id)
                return Overloaded("this process has no file descriptors left; ask again")
            case _:
                return None


def _request_id(sent: str | None) -> str:
    """The client's own id where it is harmless to repeat in a header and a log, else a new one."""
    return sent if sent and _USABLE_ID.fullmatch(sent) else f"req_{secrets.token_hex(16)}"
