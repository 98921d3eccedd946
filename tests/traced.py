"""A service of real processes, traced by a collector on loopback: what it exports and counts while jobs run."""

import gzip
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from d3serve.settings import Settings
from d3serve.up.supervisor import bind

SECRET = "zanzibar-marmalade"  # noqa: S105 - a text that no one else would write
CALLER = "0af7651916cd43dd8448eb211c80319c"
UNSAMPLED = "1bf7651916cd43dd8448eb211c80319c"
PATIENCE_S = 90


@dataclass
class Span:
    """One span as a collector gets it."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    links: list
    attributes: dict
    failed: bool


@dataclass
class Collector:
    """Takes traces at /v1/traces, while it is `open`, and webhooks elsewhere."""

    exported: list = field(default_factory=list)
    hooks: list = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def spans(self):
        found = []
        for body in list(self.exported):
            request = ExportTraceServiceRequest.FromString(body)
            for of_process in request.resource_spans:
                told = {each.key: each.value.string_value for each in of_process.resource.attributes}
                for scope in of_process.scope_spans:
                    found += [_span(told["service.name"], each) for each in scope.spans]
        return found

    def wait_for_hooks(self, count):
        """Wait until so many webhooks have come."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.hooks) < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for(self, what):
        """Wait until this is true of the spans; give them."""
        deadline = time.monotonic() + PATIENCE_S
        while not what(spans := self.spans()):
            assert time.monotonic() < deadline, [(each.name, each.trace) for each in spans]
            time.sleep(0.1)
        return spans


def _span(service, raw):
    attributes = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in raw.attributes}
    links = [(link.trace_id.hex(), link.span_id.hex()) for link in raw.links]
    return Span(
        service, raw.name, raw.trace_id.hex(), raw.span_id.hex(), raw.parent_span_id.hex(),
        raw.start_time_unix_nano, raw.end_time_unix_nano, links, attributes, raw.status.code == 2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def collector():
    made = Collector()
    made.open.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                made.open.wait(PATIENCE_S)
                zipped = self.headers.get("Content-Encoding") == "gzip"
                made.exported.append(gzip.decompress(body) if zipped else body)
            else:
                made.hooks.append(dict(self.headers))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        yield made
        server.shutdown()


@dataclass
class Service:
    """An API, a worker and a webhook sender."""

    url: str
    worker: subprocess.Popen

    @contextmanager
    def worker_held(self):
        """Within the block the worker stands still: what comes meanwhile it claims together."""
        os.killpg(self.worker.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.worker.pid, signal.SIGCONT)

    def metrics(self):
        """Each sample of /metrics by its name and labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def metrics_when(self, what):
        """Wait until this is true of the metrics; give them."""
        deadline = time.monotonic() + PATIENCE_S
        while not what(now := self.metrics()):
            assert time.monotonic() < deadline, now
            time.sleep(0.1)
        return now


@contextmanager
def _process(env, *command, pass_fds=()):
    process = subprocess.Popen(
        [sys.executable, "-m", "d3serve", *command], env=env, pass_fds=pass_fds, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def serving(redis_url, collector, namespace, **told):
    """An API, a worker and a webhook sender, which send their spans to the collector; `told` is their environment."""
    settings = Settings(
        redis_url=redis_url, namespace=namespace, model="fake:?faults=1&state_ms=5", log_level="error",
        webhook_allow=("127.0.0.0/8",),
    )  # fmt: skip
    env = {name: value for name, value in os.environ.items() if not name.startswith(("D3SERVE_", "OTEL_"))}
    env |= settings.to_env() | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url} | told
    with ExitStack() as running:
        listener = running.enter_context(bind("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running.enter_context(
            _process(env, "api", "--fd", str(listener.fileno()), pass_fds=(listener.fileno(),))
        )
        worker = running.enter_context(_process(env, "worker"))
        running.enter_context(_process(env, "webhooks"))
        running.enter_context(_process(env, "batches"))
        deadline = time.monotonic() + PATIENCE_S
        while not _is_ready(url):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield Service(url, worker)


@pytest.fixture(scope="module")
def service(redis_url, collector):
    with serving(redis_url, collector, "traced", OTEL_BSP_SCHEDULE_DELAY="100") as running:
        yield running


def _is_ready(url):
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", timeout=2).is_success
    return False
