"""Webhook endpoints, secrets and the delivery log over HTTP; jobs whose events could never arrive."""

import json
import socket
from dataclasses import replace

import pytest

from d3serve.api import webhook_checks
from d3serve.api_keys import PUBLIC_TENANT
from d3serve.webhooks.outbox import Try
from d3serve.webhooks.sender import after

pytestmark = pytest.mark.anyio
BODY = {"model": "jev-latest", "state": "hello", "questions": {"q": {"type": "noul", "instructions": "x"}}}
URL = "https://hooks.example.com/in"
TENANTS = (PUBLIC_TENANT, "another")


@pytest.fixture(autouse=True)
def no_lookups(monkeypatch):
    """The API never asks a name server on a client's word."""

    def getaddrinfo(host, *_, **__):
        raise AssertionError(f"{host} was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


async def test_an_endpoint_from_its_making_to_its_end(client):
    made = await client.post("/v1/webhook-endpoints", json={"url": URL, "events": ["job.failed"]})
    assert made.status_code == 201
    endpoint = made.json()
    path = made.headers["location"]
    assert path == f"/v1/webhook-endpoints/{endpoint['id']}"
    assert endpoint["secret"].startswith("whsec_")
    shown = (await client.get(path)).json()
    assert shown == {name: value for name, value in endpoint.items() if name != "secret"}, (
        "the secret is shown again"
    )
    assert (await client.get("/v1/webhook-endpoints")).json()["data"] == [shown]
    changed = (await client.put(path, json={"url": URL + "/2"})).json()
    assert (changed["url"], changed["events"]) == (URL + "/2", [])
    rotated = (await client.post(path + "/rotate-secret")).json()
    assert rotated["secret"] != endpoint["secret"]
    assert (await client.delete(path)).status_code == 204
    for method, suffix in (
        ("GET", ""),
        ("PUT", ""),
        ("DELETE", ""),
        ("POST", "/test"),
        ("POST", "/rotate-secret"),
    ):
        answer = await client.request(method, path + suffix)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_a_job_may_name_an_endpoint_that_exists(client):
    endpoint = (await client.post("/v1/webhook-endpoints", json={"url": URL})).json()
    answer = await client.post("/v1/jobs", json=BODY | {"job": {"webhook": {"endpoint_id": endpoint["id"]}}})
    assert answer.status_code == 202


HOSTILE = [
    "https://127.0.0.1/", "https://10.0.0.1/", "https://169.254.169.254/latest/", "https://[::ffff:127.0.0.1]/",
    "https://2130706433/", "https://192.0.0.192/", "https://localhost/", "ftp://hooks.example.com/",
    "http://hooks.example.com/", "https://u:p@hooks.example.com/", "https://hooks.example.com:22/", "nonsense", "",
    "https://a..b/",
]  # fmt: skip


@pytest.mark.parametrize("url", HOSTILE)
async def test_a_url_that_leads_inside_is_refused_at_submit(url, client, stats):
    for path, body, field in (
        ("/v1/jobs", BODY | {"job": {"webhook": {"url": url}}}, "job.webhook.url"),
        ("/v1/systemone", BODY | {"job": {"webhook": {"url": url}}}, "job.webhook.url"),
        ("/v1/webhook-endpoints", {"url": url}, "url"),
    ):
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, field), answer.text
        assert answer.json()["detail"].startswith(field + " ")
    assert (await stats()).lanes["interactive"].queued_jobs == 0


async def test_a_job_cannot_name_an_endpoint_that_is_not_there(client):
    answer = await client.post("/v1/jobs", json=BODY | {"job": {"webhook": {"endpoint_id": "ep_0"}}})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "job.webhook.endpoint_id")


@pytest.mark.parametrize("host", ["new.example.com", "private.example.com", "vm", "metadata.google.internal"])
async def test_a_name_is_accepted_whatever_it_leads_to(host, client):
    answer = await client.post("/v1/jobs", json=BODY | {"job": {"webhook": {"url": f"https://{host}/"}}})
    assert answer.status_code == 202


async def test_a_tenant_whose_receivers_take_nothing_may_not_fill_the_server(client, monkeypatch, app):
    hooked = BODY | {"job": {"webhook": {"url": URL}}}
    monkeypatch.setattr(webhook_checks, "MAX_OPEN_BYTES", 2**20)
    await app.state.parts.hooks.open_delivery(PUBLIC_TENANT, "job.failed", URL, None, "x" * 2**20)
    refused = await client.post("/v1/jobs", json=hooked)
    assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
    assert refused.json()["error"]["field"] == "job.webhook"
    assert "1 MiB of webhook events wait" in refused.json()["detail"]
    assert refused.headers["retry-after"] == "60"
    assert (await client.post("/v1/jobs", json=BODY)).status_code == 202


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"url": 1},
        {"url": URL, "events": ["x"]},
        {"url": URL, "secret": "mine"},
        {"url": URL, "events": None},
    ],
)
async def test_a_bad_registration_is_refused(body, client):
    answer = await client.post("/v1/webhook-endpoints", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


async def test_a_test_event_is_due_at_once_and_its_log_can_be_read(client, app):
    endpoint = (await client.post("/v1/webhook-endpoints", json={"url": URL})).json()
    sent = await client.post(f"/v1/webhook-endpoints/{endpoint['id']}/test")
    assert sent.status_code == 202
    hooks = app.state.parts.hooks
    assert await hooks.claim(10, 30) == [sent.json()["id"]]
    (listed,) = (await client.get("/v1/webhook-deliveries")).json()["data"]
    assert listed["event"] == "webhook.test"
    assert listed["state"] == "pending"
    assert not {"data", "body", "tenant"} & set(listed)
    body = json.loads((await hooks.delivery(listed["id"])).body)
    assert (body["type"], body["data"]) == ("webhook.test", {})


async def test_two_tests_of_one_request_id_are_two_deliveries(client):
    endpoint = (await client.post("/v1/webhook-endpoints", json={"url": URL})).json()
    path, headers = f"/v1/webhook-endpoints/{endpoint['id']}/test", {"X-Request-Id": "mine"}
    ids = {(await client.post(path, headers=headers)).json()["id"] for _ in range(2)}
    assert len(ids) == 2


async def test_a_dead_delivery_is_sent_again_on_request_by_a_new_schedule(client, app):
    hooks = app.state.parts.hooks
    mine, theirs = [await hooks.open_delivery(tenant, "job.failed", URL, None, "{}") for tenant in TENANTS]
    tries = tuple(Try(1.0, 500, "the receiver answered 500", 1) for _ in range(10))
    for one in (mine, theirs):
        await hooks.settle(replace(one, state="dead", next_try_at=None, tries=tries))
    for query, ids in (
        ("", [mine.id]),
        ("?state=dead", [mine.id]),
        ("?state=delivered", []),
        ("?job_id=x", []),
    ):
        listed = (await client.get("/v1/webhook-deliveries" + query)).json()["data"]
        assert [one["id"] for one in listed] == ids
    assert await hooks.claim(10, 30) == []
    again = await client.post(f"/v1/webhook-deliveries/{mine.id}/redeliver")
    assert (again.status_code, again.json()["state"]) == (202, "pending")
    assert await hooks.claim(10, 30) == [mine.id]
    due = await hooks.delivery(mine.id)
    assert after(due, tries[0], None, now_s=0.0).next_try_at < 10, "it goes on where it had ended"
    another = await client.post(f"/v1/webhook-deliveries/{theirs.id}/redeliver")
    assert another.status_code == 404, "another tenant's"


async def test_what_is_no_longer_kept_cannot_be_sent_again(client, app):
    hooks = app.state.parts.hooks
    made = await hooks.open_delivery(PUBLIC_TENANT, "job.failed", URL, None, "{}")
    await hooks.settle(replace(made, state="delivered", next_try_at=None))
    refused = await client.post(f"/v1/webhook-deliveries/{made.id}/redeliver")
    assert (refused.status_code, refused.json()["code"]) == (410, "event_erased")
    assert "no longer kept" in refused.json()["detail"]


@pytest.mark.parametrize("kind", ["test", "redeliver"])
async def test_a_caller_aims_only_so_many_requests_a_minute_at_a_receiver(kind, client, app, monkeypatch):
    monkeypatch.setattr(webhook_checks, "SENDINGS_PER_MINUTE", 3)
    endpoint = (await client.post("/v1/webhook-endpoints", json={"url": URL})).json()
    made = await app.state.parts.hooks.open_delivery(PUBLIC_TENANT, "job.failed", URL, None, "{}")
    path = {
        "test": f"/v1/webhook-endpoints/{endpoint['id']}/test",
        "redeliver": f"/v1/webhook-deliveries/{made.id}/redeliver",
    }[kind]
    answers = [await client.post(path) for _ in range(4)]
    assert [one.status_code for one in answers] == [202, 202, 202, 429]
    assert answers[-1].json()["code"] == "rate_limited"
    assert 0 < int(answers[-1].headers["retry-after"]) <= 60


async def test_the_secret_for_urls_in_jobs_stays_the_same(client):
    secrets = [(await client.get("/v1/webhook-secret")).json()["secret"] for _ in range(2)]
    assert secrets[0] == secrets[1]
    assert secrets[0].startswith("whsec_")
