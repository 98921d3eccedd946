"""An event arrives exactly as signed, whatever happens to the API and to its receiver meanwhile.

That it does so when the sender is killed is shown in `test_sender.py`.
"""

import asyncio
import contextlib
import socket

import httpx
import pytest
import standardwebhooks

from d3serve.api.app import create_app
from d3serve.schemas import JobError
from d3serve.webhooks import sender as webhooks

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("sender")]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Retries come at once."""
    monkeypatch.setattr(webhooks, "SCHEDULE_S", (0.05,) * 9)
    monkeypatch.setattr(webhooks, "IDLE_S", 0.02)


@contextlib.asynccontextmanager
async def api(settings):
    """A client of an API that lives as long as the block."""
    application = create_app(settings)
    transport = httpx.ASGITransport(application)
    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


async def arrived(receiver, secret, count=1):
    """What came last, once `count` requests came and every one of them has been verified."""
    await asyncio.to_thread(receiver.wait_for, count)
    for got in receiver.got:
        headers = {name.lower(): value for name, value in got.headers.items()}
        assert standardwebhooks.Webhook(secret).verify(got.body, headers) == got.event
    assert len({(got.headers["webhook-id"], got.body) for got in receiver.got}) == 1
    return receiver.got[-1]


async def tries(hooks, count):
    """The only delivery once it has so many tries."""
    async with asyncio.timeout(60):
        while True:
            for delivery in await hooks.deliveries("acme"):
                if len(delivery.tries) >= count:
                    return delivery
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "answer",
    [(301, {"Location": "http://127.0.0.1:1/"}), (413, {}), (429, {"Retry-After": "0"}), (503, {})],
    ids=lambda answer: str(answer[0]),
)
async def test_after_a_receiver_that_refused_it_twice(answer, finish_job, hooks, make_receiver):
    receiver = make_receiver(answer, answer)
    job_id = await finish_job({"url": receiver.url})
    got = await arrived(receiver, await hooks.tenant_secret("acme"), 3)
    assert got.event["data"]["id"] == job_id
    assert [one.status for one in (await tries(hooks, 3)).tries] == [answer[0], answer[0], 200]


async def test_after_a_receiver_that_was_down_for_three_tries(finish_job, hooks, make_receiver):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    job_id = await finish_job({"url": f"http://127.0.0.1:{port}/hook"})
    await tries(hooks, 3)
    got = await arrived(make_receiver(port=port), await hooks.tenant_secret("acme"))
    assert got.event["data"]["id"] == job_id
    assert [one.status for one in (await tries(hooks, 4)).tries][:3] == [None] * 3


async def test_not_after_a_410_which_ends_it(finish_job, hooks, make_receiver):
    receiver = make_receiver((410, {}))
    await finish_job({"url": receiver.url})
    delivery = await tries(hooks, 1)
    assert (delivery.next_try_at, len(receiver.got)) == (None, 1)


async def test_after_a_restart_of_the_api(settings, turns, make_receiver):
    receiver = make_receiver((500, {}))
    question = {"q": {"type": "noul", "instructions": "x"}}
    body = {
        "model": "jev-latest",
        "state": "s",
        "questions": question,
        "job": {"webhook": {"url": receiver.url}},
    }
    async with api(settings) as client:
        job = (await client.post("/v1/jobs", json=body)).json()
    turn = turns.claim(1)
    turns.fail(turn.lease, job["id"], JobError(code="device_error", message="broken"))
    async with api(settings) as client:
        got = await arrived(receiver, (await client.get("/v1/webhook-secret")).json()["secret"], 2)
        shown = (await client.get("/v1/webhook-deliveries", params={"job_id": job["id"]})).json()["data"]
    assert got.event["data"]["id"] == job["id"]
    assert [one["id"] for one in shown] == [got.headers["webhook-id"]]
