"""Traces by OpenTelemetry: off unless its standard variables name a collector and the extra `otel` is installed.

A span carries ids, numbers and our own words, never what a client wrote: so exceptions are told by their code alone.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OFF: Final = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}
PATIENCE_S: Final = 3.0  # what a collector that does not answer may cost a process that stops
Attributes = dict[str, str | int | float | bool]
Kind = Literal["internal", "consumer", "client", "producer"]

_W3C: Final = TraceContextTextMapPropagator()
_provider: list["TracerProvider"] = []  # one where this process is traced

log = structlog.get_logger(__name__)


def start_tracing(process: str) -> None:
    """Send this process's spans to the collector that the environment names, if it names one.

    Without the extra, or with a variable that the SDK refuses, it says so in the log and goes on untraced: who watches
    must not stop what is watched.
    """
    told = {name: os.environ.get(name, "").strip() for name in (*ENDPOINTS, *OFF)}
    switched_off = any(told[name].lower() == value for name, value in OFF.items())
    if _provider or switched_off or not any(told[name] for name in ENDPOINTS):
        return
    try:
        from d3serve.tracing.export import make_provider  # noqa: PLC0415 # the extra

        _provider.append(make_provider(process))
    except ImportError as error:
        log.warning("traces.off", missing=error.name, need="pip install 'd3serve[otel]'")
    except ValueError as error:
        log.warning("traces.off", reason=str(error))


def is_on() -> bool:
    """Whether this process is traced."""
    return bool(_provider)


def provider() -> "TracerProvider | None":
    """What makes this process's spans, or None where it is not traced."""
    return next(iter(_provider), None)  # whatever another thread stops meanwhile


def stop_tracing() -> None:
    """Send what has not been sent, if the collector takes it soon: called at the end of each process.

    Not by an exit handler: neither a child of Celery's pool nor uvicorn, which ends by the signal, runs those.
    """
    while _provider:
        sends = threading.Thread(target=_provider.pop().shutdown, daemon=True)
        sends.start()
        sends.join(PATIENCE_S)


def tell(
    name: str,
    parent: str | None,
    during: tuple[float, float],
    attributes: Attributes,
    *,
    kind: Kind = "internal",
    links: Sequence[str | None] = (),
    error: str | None = None,
) -> str | None:
    """Tell of something that is over, in the trace of `parent`; the `traceparent` of what was told.

    None, and nothing is told, where `parent` names no trace (it would be one of its own), or one that is not sampled.

    Args:
        name: what happened, the same for all jobs.
        parent: a `traceparent`.
        during: when it began and ended, in seconds since the epoch.
        attributes: no text of a client's.
        kind: OpenTelemetry's.
        links: the `traceparent` of each span that it belongs to beside its parent.
        error: the code of what went wrong.
    """
    began, ended = during
    span = _span(name, parent, attributes, kind, links, began)
    if span is None or not span.is_recording():
        return None
    _mark(span, error)
    span.end(_ns(max(began, ended)))
    return _traceparent(span)


@contextmanager
def telling(
    name: str, parent: str | None, attributes: Attributes, *, kind: Kind, begins: bool = False
) -> Iterator["Telling"]:
    """Tell of what happens within the block, as `tell`; untraced, `parent` is what it hands on.

    With `begins`, what has no parent begins a trace of its own.
    """
    span = _span(name, parent, attributes, kind, begins=begins)
    if span is None:
        yield Telling(parent)
        return
    told = Telling(_traceparent(span))
    try:
        yield told
    finally:
        span.set_attributes(told.attributes)
        _mark(span, told.error)
        span.end()


class Telling:
    """What is known of a span only at its end; `traceparent` is for whoever is called meanwhile."""

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent
        self.attributes: Attributes = {}
        self.error: str | None = None


def traceparent_here(sent: str | None) -> str | None:
    """The `traceparent` of the span that this request is in; where it is in none, what its caller sent."""
    return (_traceparent(trace.get_current_span()) or sent) if _provider else sent


def say_job(job_id: str) -> None:
    """Say in the span of this request which job it is about, so that it is found before a worker tells of it."""
    if _provider:
        trace.get_current_span().set_attribute("d3serve.job_id", job_id)


def _span(
    name: str,
    parent: str | None,
    attributes: Attributes,
    kind: Kind,
    links: Sequence[str | None] = (),
    began: float | None = None,
    *,
    begins: bool = False,
) -> trace.Span | None:
    made = provider()
    place = _place(parent) if made is not None else None
    if made is None or (place is None and not begins):
        return None
    above = (
        Context() if place is None else trace.set_span_in_context(trace.NonRecordingSpan(place), Context())
    )
    return made.get_tracer("d3serve").start_span(
        name,
        context=above,
        kind=trace.SpanKind[kind.upper()],
        attributes=attributes,
        links=[trace.Link(linked) for linked in map(_place, links) if linked is not None],
        start_time=None if began is None else _ns(began),
    )


def _mark(span: trace.Span, error: str | None) -> None:
    if error is not None:
        span.set_attribute("error.type", error)
        span.set_status(trace.StatusCode.ERROR)


def _place(traceparent: str | None) -> trace.SpanContext | None:
    """The span that it names; None where it names none, as one of zeros does."""
    context = _W3C.extract({"traceparent": traceparent or ""}, Context())
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def _traceparent(span: trace.Span) -> str | None:
    carrier = dict[str, str]()
    _W3C.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent")


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
