"""What the routes write is what the document describes: every field of every body, and nothing else."""

import pytest
from pydantic import TypeAdapter

from d3serve.api import response_models as models

pytestmark = pytest.mark.anyio
JOB = {
    "model": "jev-latest", "state": "hello", "job": {"metadata": {"a": "b"}},
    "questions": {"q": {"type": "noul", "instructions": "x"}},
}  # fmt: skip
RECEIVER = {"url": "https://example.com/hook", "events": ["job.failed"]}


@pytest.fixture
def described(client):
    """Asks, and holds the body to its model; gives the body."""

    async def ask(kind, method, path, **options):
        answer = await client.request(method, path, **options)
        assert answer.is_success, answer.text
        body = answer.json()
        adapter = TypeAdapter(kind)
        assert adapter.dump_python(adapter.validate_python(body), mode="json", exclude_unset=True) == body
        return body

    return ask


async def test_jobs(described, worker):
    path = (await described(models.JobResource, "POST", "/v1/jobs", json=JOB))["urls"]["self"]
    waiting = await described(models.JobResource, "GET", path)
    assert "queue" in waiting
    assert "started_at" not in waiting, "what there is not yet is left out"
    worker.work()
    done = await described(models.JobResource, "GET", f"{path}?include=result&include=request")
    assert list(done["asked"]["questions"]) == ["q"]
    assert done["result"]["answers"]["q"]["noul"] == 0.75
    await described(models.DecisionResponse, "GET", f"{path}/result")
    await described(models.JobResource, "POST", "/v1/jobs", json={**JOB, "state": "another"})
    worker.fail(worker.claim(), "device_error", "an illegal address")
    page = await described(models.JobList, "GET", "/v1/jobs")
    assert page["data"][0]["error"] == {
        "code": "device_error", "message": "an illegal address", "retryable": False,
    }  # fmt: skip
    failed = page["data"][0]["urls"]["self"]
    await described(models.JobResource, "POST", f"{failed}/retry")
    await described(models.JobResource, "POST", f"{failed}/cancel")


async def test_counting(described, worker, counter):  # noqa: ARG001 - one shows itself, the other counts
    assert (await described(models.CountResource, "POST", "/v1/count", json=JOB))["fits"]
    short = {**JOB, "state": "so " * 200_000, "job": {"lane": "interactive"}}
    assert not (await described(models.CountResource, "POST", "/v1/count", json=short))["fits"]


async def test_the_service(described, worker):  # noqa: ARG001 - it shows itself
    await described(models.JobResource, "POST", "/v1/jobs", json=JOB)
    assert (await described(models.ModelList, "GET", "/v1/models"))["models"]
    assert (await described(models.WholeQueue, "GET", "/v1/queue"))["lanes"]["interactive"][
        "queued_jobs"
    ] == 1
    await described(models.Liveness, "GET", "/healthz")
    await described(models.Readiness, "GET", "/readyz")


async def test_webhooks(described):
    made = await described(models.EndpointWithSecret, "POST", "/v1/webhook-endpoints", json=RECEIVER)
    path = f"/v1/webhook-endpoints/{made['id']}"
    await described(models.EndpointResource, "GET", path)
    await described(models.EndpointResource, "PUT", path, json=RECEIVER)
    await described(models.EndpointWithSecret, "POST", f"{path}/rotate-secret")
    assert (await described(models.EndpointList, "GET", "/v1/webhook-endpoints"))["data"]
    sent = await described(models.DeliveryResource, "POST", f"{path}/test")
    await described(models.DeliveryResource, "POST", f"/v1/webhook-deliveries/{sent['id']}/redeliver")
    assert (await described(models.DeliveryList, "GET", "/v1/webhook-deliveries"))["data"]
    await described(models.WebhookSecret, "GET", "/v1/webhook-secret")
