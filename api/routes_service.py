"""What operators and clients ask about the service itself: models, queue, health, metrics."""

import os
from collections import Counter
from collections.abc import Iterable

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.requests import Request

from d3serve.api.auth import Admin, Reader
from d3serve.api.dependencies import TheParts
from d3serve.api.openapi import PROBLEMS
from d3serve.api.resources import JSON, models_resource, queue_resource, workers_resource
from d3serve.api.response_models import Liveness, ModelList, OwnQueue, Readiness, WholeQueue, WorkerList
from d3serve.errors import NoWorker
from d3serve.settings import METRICS_FOLDER
from d3serve.store.records import QueueStats

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
    """Prometheus text: HTTP counts of all API processes of this host, and the queue as Redis has it."""
    registry = CollectorRegistry()
    registry.register(_Queue(await parts.store.stats()))
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


class _Queue(Collector):
    """One look at the queue as metrics; workers' own counts reach Prometheus through Redis the same way."""

    def __init__(self, stats: QueueStats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Gauges by lane, and counters of how jobs ended."""
        for field, help_text in (
            ("queued_jobs", "Jobs that wait."),
            ("ready_states", "States that wait with jobs on them."),
            ("queued_tokens", "Tokens that wait."),
            ("queued_bytes", "Bytes of requests that wait."),
            ("oldest_age_s", "Age of the oldest waiting job, in seconds."),
        ):
            gauge = GaugeMetricFamily(f"d3serve_queue_{field}", help_text, labels=["lane"])
            for lane, of_lane in self._stats.lanes.items():
                gauge.add_metric([lane], getattr(of_lane, field))
            yield gauge
        yield GaugeMetricFamily("d3serve_running_jobs", "Jobs that run.", value=self._stats.running_jobs)
        yield GaugeMetricFamily("d3serve_workers", "Live workers.", value=self._stats.workers)
        yield GaugeMetricFamily(
            "d3serve_tokens_per_s", "Tokens read a second.", value=self._stats.tokens_per_s
        )
        finished = CounterMetricFamily("d3serve_finished_jobs", "Jobs by how they ended.", labels=["status"])
        for status, count in self._stats.finished.items():
            finished.add_metric([status], count)
        yield finished
        for name, label, help_text, kinds in (
            ("tokens", "kind", "Prompt tokens of answered jobs: as asked, and as read.", ("asked", "read")),
            ("states", "source", "States of answered jobs: read, or found in a cache.", ("cached", "read")),
        ):
            work = CounterMetricFamily(f"d3serve_{name}", help_text, labels=[label])
            for kind in kinds:
                work.add_metric([kind], self._stats.work.get(f"{name}_{kind}", 0))
            yield work
