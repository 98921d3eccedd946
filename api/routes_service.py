"""What operators and clients ask about the service itself: models, queue, health, metrics."""

import os
from collections import Counter

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.requests import Request

from d3serve.api.auth import Admin, Reader
from d3serve.api.dependencies import TheParts
from d3serve.api.metrics import QueueMetrics
from d3serve.api.openapi import PROBLEMS
from d3serve.api.resources import JSON, models_resource, queue_resource, workers_resource
from d3serve.api.response_models import Liveness, ModelList, OwnQueue, Readiness, WholeQueue, WorkerList
from d3serve.errors import NoWorker
from d3serve.settings import METRICS_FOLDER

router = APIRouter(tags=["service"], responses=PROBLEMS)


@router.get("/v1/models", response_model=ModelList)
async def models(parts: TheParts, _caller: Reader) -> Response:
    """What live workers serve, and the limits of a request; for OpenAI's client and the stock SDK alike."""
    return JSON(models_resource(await parts.models.live(), parts.settings))


@router.get("/v1/queue", response_model=WholeQueue | OwnQueue)
async def queue(request: Request, parts: TheParts, tenant: Reader) -> Response:
    """How much of the caller's own jobs waits; with the scope `admin` the whole queue, its age and its speed.

    Counters of the whole tell one tenant of another's jobs one by one.
    """
    if "admin" in request.state.scopes:
        return JSON(queue_resource(await parts.store.stats()))
    return JSON({"object": "decision.queue", "lanes": await parts.store.waiting_of(tenant)})


@router.get("/v1/workers", response_model=WorkerList)
async def workers(parts: TheParts, _caller: Admin) -> Response:
    """Live workers: the model and revision of each, what it runs now, how fast it is, what its cache holds."""
    running = await parts.store.running()
    return JSON(workers_resource(await parts.store.workers(), running))


@router.get("/healthz")
async def healthz() -> Liveness:
    """Answer, for a liveness probe; ask nobody else, so that Redis' troubles do not restart us."""
    return Liveness(status="ok")


@router.get("/readyz")
async def readyz(parts: TheParts) -> Readiness:
    """For a readiness probe: Redis takes writes and a worker has a model loaded; else 503, why."""
    await parts.store.ping()
    workers = await parts.store.workers()
    ready = [worker for worker in workers if worker.ready and worker.model]
    if not ready:
        loads = Counter(worker.load for worker in workers)  # their names are nobody's business who has no key
        states = ", ".join(f"{count} {load}" for load, count in loads.items()) or "none has shown itself"
        raise NoWorker(f"no worker has its model loaded: {states}")
    models = sorted({worker.model.name for worker in ready if worker.model})
    return Readiness(status="ok", workers=len(ready), models=models)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request, parts: TheParts, _caller: Admin) -> Response:
    """Prometheus text: HTTP counts of all API processes of this host, queue, workers and times as Redis has them."""
    registry, store = CollectorRegistry(), parts.store
    registry.register(QueueMetrics(await store.stats(), await store.tally(), await store.workers()))
    text = generate_latest(_http_counts(request)) + generate_latest(registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _http_counts(request: Request) -> CollectorRegistry:
    """The counts of this process, or the sum over those that share a folder for them, dead ones included."""
    own: CollectorRegistry = request.app.state.http_registry
    if METRICS_FOLDER not in os.environ:
        return own
    shared = CollectorRegistry()
    MultiProcessCollector(shared)  # type: ignore[no-untyped-call] # prometheus_client types it in part
    return shared
