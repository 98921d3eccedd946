"""The SDK's part: what makes spans, and what they lose before they leave. Only with the extra `otel`."""

import os
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

MAX_LINKS: Final = 2_000  # as many jobs as a turn claims; the SDK's own limit of 128 would lose the others
MAX_SPANS: Final = (
    16_384  # that wait to be sent: of such a turn 10,000 come at once. The SDK's own limit is 2,048
)
# Of a request, what its caller worded: a path that is none of ours may be anything. Its route and our ids say enough.
WORDED_BY_CALLERS: Final = ("url.path", "url.query", "http.request.method_original", "server.address")
REDACTED: Final = "REDACTED"


class Discreet(SpanProcessor):
    """Blanks what FastAPI tells of a request in its caller's words."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:  # noqa: ARG002 # the SDK's
        """Called when a span has its first attributes."""
        for name in WORDED_BY_CALLERS:
            if name in (span.attributes or {}):
                span.set_attribute(name, REDACTED)


def make_provider(process: str) -> TracerProvider:
    """A provider as the SDK's standard variables want it; a name that nobody has given is ours to give."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: f"d3serve-{process}"}))
    limits = SpanLimits(max_links=MAX_LINKS)
    provider = TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)
    provider.add_span_processor(Discreet())
    most = None if os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else MAX_SPANS
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=most))
    return provider
