"""Traces are off unless a collector is named and the SDK is there; off, nothing of the SDK is loaded."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from d3serve import tracing
from d3serve.api.app import create_app
from d3serve.api.dependencies import submit_headers
from d3serve.settings import Settings
from d3serve.worker import traces

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def own_provider(monkeypatch):
    for name in (*tracing.ENDPOINTS, *tracing.OFF, "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tracing, "PATIENCE_S", 0.1)
    yield
    tracing.stop_tracing()


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},  # as compose sets it where nobody has
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_SERVICE_NAME": "mine"},
    ],
)
def test_without_a_collector_it_stays_off(monkeypatch, told):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    tracing.start_tracing("api")
    assert not tracing.is_on()
    assert tracing.tell("queue", SENT, (0.0, 1.0), {}) is None
    with tracing.telling("webhook", SENT, {}, kind="client") as told_of:
        assert told_of.traceparent == SENT, "what the caller sent goes on to its receiver"


def test_off_the_api_asks_fastapi_for_nothing_and_keeps_what_the_caller_sent(monkeypatch):
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    app = create_app(Settings())
    assert not app._native_telemetry.enabled()
    assert app._telemetry["auto_configure"] is False, "it would send logs with what callers wrote"
    assert submit_headers(Headers({"traceparent": SENT})).traceparent == SENT


def test_off_nothing_that_sends_is_loaded():
    """Of the SDK redis-py loads a part for itself, where it is installed."""
    code = (
        "import sys, d3serve.api.main, d3serve.webhooks.main, d3serve.worker.tasks as t; t.start_tracing('worker'); "
        "print([name for name in sys.modules if name.startswith(('opentelemetry.exporter', 'd3serve.tracing.'))])"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_extra_the_log_says_what_to_install_and_the_process_goes_on(monkeypatch):
    monkeypatch.setenv(*next(iter(ENDPOINT.items())))
    monkeypatch.delitem(sys.modules, "d3serve.tracing.export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    logged = []
    warning = lambda event, **told: logged.append((event, told["need"]))  # noqa: E731
    monkeypatch.setattr(tracing, "log", SimpleNamespace(warning=warning))
    tracing.start_tracing("api")
    assert not tracing.is_on()
    assert logged == [("traces.off", "pip install 'd3serve[otel]'")]


@pytest.mark.parametrize("name", ["OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"])
def test_a_variable_that_the_sdk_refuses_turns_traces_off_and_stops_nothing(monkeypatch, name):
    monkeypatch.setenv(*next(iter(ENDPOINT.items())))
    monkeypatch.setenv(name, "-1")
    logged = []
    warning = lambda event, **told: logged.append((event, *told))  # noqa: E731
    monkeypatch.setattr(tracing, "log", SimpleNamespace(warning=warning))
    tracing.start_tracing("api")
    assert not tracing.is_on()
    assert logged == [("traces.off", "reason")]


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_a_collector_turns_it_on_and_a_name_that_an_operator_gives_stays(monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:9/v1/traces")
    tracing.start_tracing("worker")
    provider = tracing.provider()
    assert provider is not None
    assert provider.resource.attributes["service.name"] == "d3serve-worker"
    tracing.stop_tracing()
    assert not tracing.is_on()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing.start_tracing("worker")
    assert tracing.provider().resource.attributes["service.name"] == "mine"


NO_SPAN = SENT.replace("b7ad6b7169203331", "0" * 16)


@pytest.mark.parametrize("parent", [None, "", "no traceparent", NO_SPAN, f"ff{SENT[2:]}"])
def test_a_job_that_is_part_of_no_trace_begins_none(monkeypatch, parent):
    monkeypatch.setenv(*next(iter(ENDPOINT.items())))
    tracing.start_tracing("worker")
    assert tracing.tell("queue", parent, (0.0, 1.0), {}) is None
    with tracing.telling("webhook", parent, {}, kind="client") as told_of:
        assert told_of.traceparent == parent


def test_a_link_to_no_span_is_left_out(monkeypatch):
    monkeypatch.setenv(*next(iter(ENDPOINT.items())))
    tracing.start_tracing("worker")
    assert tracing.tell("pass", SENT, (0.0, 1.0), {}, links=[SENT, NO_SPAN]).startswith(SENT[:36])


UNSAMPLED = f"{SENT[:-2]}00"


def test_a_pass_whose_first_job_is_not_sampled_is_linked_all_the_same(monkeypatch):
    monkeypatch.setenv(*next(iter(ENDPOINT.items())))
    tracing.start_tracing("worker")
    told = []

    def tell(*args, links, **named):
        told.append((list(links), real(*args, links=links, **named)))
        return told[-1][1]

    real = tracing.tell
    monkeypatch.setattr(tracing, "tell", tell)
    jobs = [claimed(parent) for parent in (UNSAMPLED, None, SENT, SENT)]
    traces.tell_pass(jobs, (0.0, 1.0))
    everyone = [UNSAMPLED, None, SENT, SENT]
    assert [links for links, _ in told] == [everyone, everyone, everyone, [told[2][1]]]
    assert [span is not None for _, span in told] == [False, False, True, True]


def claimed(traceparent):
    """A job of a pass."""
    return SimpleNamespace(id="j", lane="offline", attempt=1, model="m", traceparent=traceparent)
