"""`POST /v1/count`: checked as a submission, counted by a worker, and no job is made."""

import pytest
from submissions import NOUL

from d3serve.settings import Settings
from d3serve.store import counting

pytestmark = pytest.mark.anyio


@pytest.fixture
def settings(redis_url, raw_redis):  # noqa: ARG001 - the server is emptied first
    return Settings(redis_url=redis_url, namespace="counts", max_interactive_tokens=300)


def body(state="a parcel", job=None, **questions):
    told = {"model": "jev-latest", "state": state, "questions": questions or {"q": NOUL}}
    return told | ({"job": job} if job else {})


@pytest.mark.usefixtures("worker", "counter")
async def test_a_request_is_counted_and_no_job_is_made(client):
    sent = await client.post("/v1/count", json=body(a=NOUL, b=NOUL))
    told = sent.json()
    assert sent.status_code == 200, told
    assert (told["object"], told["lane"], told["fits"], told["refused"]) == (
        "decision.count",
        "interactive",
        True,
        [],
    )
    assert told["total_tokens"] == told["state_tokens"] + sum(
        each["tokens"] for each in told["questions"].values()
    )
    assert told["limits"] == {"prompt": 131_072, "job": 1_048_576}
    assert told["estimate"]["queue_s"] == 0
    assert told["estimate"]["work_s"] == pytest.approx(told["total_tokens"] / 1000, abs=0.01)
    assert (await client.get("/v1/jobs")).json()["data"] == []


@pytest.mark.usefixtures("worker", "counter")
async def test_the_estimate_grows_with_what_waits(client):
    for number in range(3):
        await client.post("/v1/jobs", json=body(f"parcel {number} " * 40))
    told = (await client.post("/v1/count", json=body())).json()
    assert told["estimate"]["queue_s"] > 0.2


@pytest.mark.usefixtures("worker", "counter")
async def test_what_a_job_would_be_refused_for_is_told(client):
    sent = await client.post("/v1/count", json=body("so " * 600, job={"lane": "interactive"}))
    told = sent.json()
    assert (sent.status_code, told["fits"], told["total_tokens"], told["estimate"]) == (
        200,
        False,
        None,
        None,
    )
    assert [refusal["code"] for refusal in told["refused"]] == ["max_tokens_exceeded"]
    assert told["limits"]["prompt"] == 300
    assert (await client.post("/v1/count", json=body("so " * 600))).json()["lane"] == "offline"


@pytest.mark.usefixtures("worker", "counter")
async def test_what_is_refused_as_a_submission_is_refused_alike(client):
    for wrong in (
        body() | {"questions": {}},
        body() | {"model": "nobody/knows"},
        body() | {"audio": "x"},
    ):
        counted, posted = [await client.post(path, json=wrong) for path in ("/v1/count", "/v1/jobs")]
        assert counted.status_code == posted.status_code >= 400
        assert counted.json()["code"] == posted.json()["code"]


async def test_without_a_worker_it_is_told(client, worker, monkeypatch):
    monkeypatch.setattr(counting, "WITHIN_S", 1.0)
    sent = await client.post("/v1/count", json=body())  # one that has loaded, and knows of no counting
    assert (sent.status_code, sent.json()["code"]) == (503, "no_worker")
    worker.turns.retire()
    sent = await client.post("/v1/count", json=body())
    assert sent.status_code == 503
