"""What a process has not sent yet it sends when it stops, and no collector can keep it from stopping."""

import socket
import time

import httpx
from traced import PATIENCE_S, serving

from d3serve import tracing

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NEVER_MS = "3600000"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SPANS = {"POST /v1/jobs", "queue", "claim", "tokenize", "pass", "commit", "webhook"}


def test_every_process_sends_its_last_spans_as_it_stops(redis_url, collector):
    asked = {"q": {"type": "noul", "instructions": "Is it late?"}}
    job = {
        "model": "fake",
        "state": "s",
        "questions": asked,
        "job": {"webhook": {"url": f"{collector.url}/hook"}},
    }
    with serving(redis_url, collector, "stopping", OTEL_BSP_SCHEDULE_DELAY=NEVER_MS) as service:
        assert httpx.post(
            f"{service.url}/v1/jobs", json=job, headers={"Prefer": "wait=60"}, timeout=90
        ).is_success
        deadline = time.monotonic() + PATIENCE_S
        while not collector.hooks:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert collector.spans() == [], "it was to wait"
    assert {one.name for one in collector.spans()} >= SPANS


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
