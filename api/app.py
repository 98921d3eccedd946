"""The HTTP application: `create_app(settings)` puts the routes, the parts and the error body together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from d3serve import __version__, tracing
from d3serve.api import (
    routes_batches,
    routes_count,
    routes_jobs,
    routes_pages,
    routes_service,
    routes_sync,
    routes_webhooks,
)
from d3serve.api.background import Background
from d3serve.api.budget import BodyBudget
from d3serve.api.calls import Calls
from d3serve.api.dependencies import Parts
from d3serve.api.edge import QUIET, Edge, HTTPMetrics
from d3serve.api.intake import Intake
from d3serve.api.openapi import describe, operation_id
from d3serve.api.page_guard import refuse_web_pages
from d3serve.api.problems import problem, problem_response
from d3serve.api.served import ServedModels
from d3serve.api_keys import KeyRing, make_key_ring
from d3serve.errors import D3ServeError, InvalidRequest
from d3serve.settings import Settings
from d3serve.store.batches import BatchStore
from d3serve.store.counting import CountDesk
from d3serve.store.jobs import JobStore
from d3serve.text.wording import complaint
from d3serve.wake.celery_app import Waker
from d3serve.webhooks.egress import EgressPolicy
from d3serve.webhooks.outbox import HookStore


def create_app(settings: Settings, *, open_store: Callable[[Settings], JobStore] = JobStore.open) -> FastAPI:
    """The API on the store at `settings.redis_url`; opens it at start, closes it at shutdown.

    Raises:
        InvalidSettings: it would listen beyond this host without API keys, or they cannot be read.
    """
    keys = make_key_ring(settings)
    egress = EgressPolicy(settings.webhook_allow)

    def admit(headers: Headers) -> None:
        if keys is None:
            refuse_web_pages(headers, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with _running(settings, keys, egress, open_store) as app.state.parts:
                yield
        finally:
            await asyncio.to_thread(tracing.stop_tracing)

    app = FastAPI(
        title="d3serve",
        summary="Typed decisions about a state, each state read once.",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,  # the stock SDK follows no redirect
        generate_unique_id_function=operation_id,
        telemetry=_telemetry(),
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere; ours are in routes_pages
        redoc_url=None,
    )
    app.state.http_registry = CollectorRegistry()
    app.add_middleware(Edge, metrics=HTTPMetrics(app.state.http_registry), admit=admit)
    for kind in (D3ServeError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refuse)
    for direct in (routes_jobs.submissions, routes_sync.router):
        app.router.routes.extend(direct.routes)  # an included router is searched twice
    app.include_router(routes_jobs.router)
    app.include_router(routes_count.router)
    app.include_router(routes_batches.router)
    app.include_router(routes_webhooks.router)
    app.include_router(routes_service.router)
    app.include_router(routes_pages.router)
    app.mount("/docs/files", routes_pages.files)
    app.mount("/console/files", routes_pages.console_files)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]  # FastAPI's documented way
    return app


def _telemetry() -> TelemetryConfig:
    """What FastAPI tells of requests: a span of each but probes, where this process is traced.

    Its metrics would be ours again; its logs and its own set-up from the environment would tell what callers wrote.
    """
    return {
        "tracing": tracing.is_on(),
        "tracer_provider": tracing.provider(),
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
        "exclude": lambda scope: scope["path"] in QUIET,
    }


@contextlib.asynccontextmanager
async def _running(
    settings: Settings,
    keys: KeyRing | None,
    egress: EgressPolicy,
    open_store: Callable[[Settings], JobStore],
) -> AsyncIterator[Parts]:
    """The parts of the process, which end with the block."""
    calls = Calls()
    with contextlib.closing(Waker(settings)) as waker:
        async with (
            contextlib.aclosing(HookStore.open(settings)) as hooks,
            contextlib.aclosing(CountDesk.open(settings)) as counts,
            contextlib.aclosing(BatchStore.open(settings)) as batches,
            open_store(settings) as store,
            Background(store, waker) as background,
        ):
            if keys is not None:
                background.keep(calls.watch(keys))
            with contextlib.closing(Intake(settings)) as intake:
                yield Parts(
                    settings, store, ServedModels(store, settings), background, keys, hooks, egress, calls,
                    BodyBudget.of(settings), intake, counts, batches,
                )  # fmt: skip


def _refuse(request: Request, error: Exception) -> Response:
    """The one error body for our own errors, for FastAPI's about parameters and for the router's."""
    where = {"instance": request.url.path, "request_id": request.state.request_id}
    match error:
        case D3ServeError():
            return problem_response(error, **where)
        case RequestValidationError():
            return problem_response(_parameter_error(error), **where)
        case HTTPException():  # no such path, or no such method on it
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
            detail = f"{request.method} {request.url.path}: {error.detail.lower()}; see /openapi.json"
            return problem(error.status_code, code, detail, headers=error.headers, **where)
        case _:
            raise error


def _parameter_error(error: RequestValidationError) -> InvalidRequest:
    """FastAPI's complaint about a path or query parameter, in our words."""
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return InvalidRequest(f"{name} {complaint(first)}", field=name)
