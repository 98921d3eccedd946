"""What a process has not sent yet it sends when it stops, and no collector can keep it from working or stopping."""

import socket
import time

import httpx
from traced import serving

from d3serve import tracing

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NEVER_MS = "3600000"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SPANS = {"POST /v1/jobs", "queue", "claim", "tokenize", "pass", "commit", "webhook"}


def answered(service, hook):
    """A job's status, once it has ended."""
    asked = {"q": {"type": "noul", "instructions": "Is it late?"}}
    job = {"model": "fake", "state": "s", "questions": asked, "job": {"webhook": {"url": hook}}}
    told = httpx.post(f"{service.url}/v1/jobs", json=job, headers={"Prefer": "wait=60"}, timeout=90)
    return told.json()["status"]


def test_every_process_sends_its_last_spans_as_it_stops(redis_url, collector):
    collector.exported.clear()
    with serving(redis_url, collector, "stopping", OTEL_BSP_SCHEDULE_DELAY=NEVER_MS) as service:
        hooks = len(collector.hooks)
        assert answered(service, f"{collector.url}/hook") == "succeeded"
        collector.wait_for_hooks(hooks + 1)
        assert collector.spans() == [], "it was to wait"
    assert {one.name for one in collector.spans()} >= SPANS


def test_jobs_and_webhooks_go_on_beside_a_collector_that_takes_and_never_answers(redis_url, collector):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = f"http://127.0.0.1:{silent.getsockname()[1]}"
        told = {ENDPOINT: nowhere, "OTEL_BSP_SCHEDULE_DELAY": "10", "OTEL_BSP_MAX_QUEUE_SIZE": "1",
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1", "OTEL_EXPORTER_OTLP_TIMEOUT": "600"}  # fmt: skip
        before = len(collector.hooks)
        with serving(redis_url, collector, "silent", **told) as service:
            for _ in range(3):
                assert answered(service, f"{collector.url}/hook") == "succeeded"
            collector.wait_for_hooks(before + 3)


def test_all_spans_of_the_largest_turn_reach_a_collector_that_is_slow(monkeypatch, collector):
    turn, names = range(2_000), ("queue", "claim", "tokenize", "pass", "commit")
    monkeypatch.setenv(ENDPOINT, collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "large turn")
    collector.open.clear()
    tracing.start_tracing("worker")
    try:
        for name in names:
            for _ in turn:
                tracing.tell(name, SENT, (0.0, 1.0), {})
        collector.open.set()
        collector.wait_for(lambda spans: sum(one.service == "large turn" for one in spans) == 10_000)
    finally:
        collector.open.set()
        tracing.stop_tracing()


def test_a_collector_that_takes_and_never_answers_holds_up_no_process(monkeypatch):
    monkeypatch.setattr(tracing, "PATIENCE_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", NEVER_MS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracing.start_tracing("api")
        assert tracing.tell("queue", SENT, (0.0, 1.0), {}) is not None
        began = time.monotonic()
        tracing.stop_tracing()
        assert time.monotonic() - began < 60
