"""From a request over HTTP to its signed event, and what the sender's process does not load."""

import subprocess
import sys

import httpx
import pytest

from d3serve.api.app import create_app
from d3serve.api_keys import PUBLIC_TENANT
from d3serve.client import verify_webhook
from d3serve.schemas import JobError
from d3serve.webhooks import sender as webhooks


@pytest.mark.anyio
@pytest.mark.usefixtures("sender")
async def test_a_job_posted_over_http_has_its_event_signed_with_the_secret_shown_over_http(
    settings, turns, make_receiver, hooks, monkeypatch
):
    monkeypatch.setattr(webhooks, "SCHEDULE_S", (0.05,) * 9)
    receiver = make_receiver((503, {"Retry-After": "0"}))
    application = create_app(settings)
    async with application.router.lifespan_context(application):
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            secret = (await client.get("/v1/webhook-secret")).json()["secret"]
            body = {
                "model": "jev-latest",
                "state": "hello",
                "questions": {"q": {"type": "noul", "instructions": "x"}},
                "job": {"webhook": {"url": receiver.url, "events": ["job.failed"]}},
            }
            job = (await client.post("/v1/jobs", json=body)).json()
            turn = turns.claim(1)
            turns.fail(turn.lease, job["id"], JobError(code="device_error", message="broken"))
            listed = {"state": "pending"}
            while listed["state"] == "pending":
                answer = await client.get("/v1/webhook-deliveries", params={"job_id": job["id"]})
                listed = (answer.json()["data"] or [listed])[0]
    got = receiver.got[-1]
    verify_webhook(got.headers, got.body, secret)
    assert got.event["data"]["id"] == job["id"]
    assert [one["status"] for one in listed["tries"]] == [503, 200]
    assert await hooks.tenant_secret(PUBLIC_TENANT) == secret


def test_the_sender_loads_no_model():
    code = (
        "import sys, d3serve.webhooks.main; "
        "bad = {'torch', 'transformers', 'fastapi'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
