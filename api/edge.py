"""What every request gets, whatever route it meets: an id, timing, a log line, a count, no bare 500."""

import re
import time
import traceback
import uuid
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from d3serve.api.problems import problem_response
from d3serve.errors import InternalError

log = structlog.get_logger("d3serve.api")
_USABLE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_QUIET: Final = frozenset({"/healthz", "/readyz", "/metrics"})  # probes: counted, not logged


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

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; an exception that nobody foresaw becomes the one error body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.perf_counter()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-store")  # else a 404 or 410 may be kept, and a secret
                headers["X-Request-Id"] = headers["x-typesafe-request-id"] = request_id
                if "allowance" in scope["state"]:
                    headers.update(scope["state"]["allowance"].headers())
                headers.append("Server-Timing", f"total;dur={(time.perf_counter() - began) * 1000:.1f}")
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = status or 499
        except Exception as error:
            # Frames and type only: the text of an unforeseen exception may quote the request.
            trace = "".join(traceback.format_tb(error.__traceback__))
            log.error("unforeseen", request_id=request_id, kind=type(error).__name__, trace=trace)
            if status:
                raise
            response = problem_response(
                InternalError("something broke on our side; the request id helps to find it"),
                instance=scope["path"],
                request_id=request_id,
            )
            await response(scope, receive, send_with_headers)
        finally:
            self._account(scope, request_id, status, time.perf_counter() - began)

    def _account(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "(none)")
        method = scope["method"] if route != "(none)" else "(any)"
        self.metrics.requests.labels(method, route, status).inc()
        self.metrics.seconds.labels(method, route).observe(seconds)
        if route not in _QUIET:
            log.info(
                "request", request_id=request_id, method=scope["method"], route=route, status=status,
                duration_ms=round(seconds * 1000, 1), key=scope["state"].get("key_id"),
            )  # fmt: skip


def _request_id(sent: str | None) -> str:
    """The client's own id where it is harmless to repeat in a header and a log, else a new one."""
    return sent if sent and _USABLE_ID.fullmatch(sent) else f"req_{uuid.uuid4().hex}"
