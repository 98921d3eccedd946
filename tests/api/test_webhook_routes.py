"""Webhook endpoints, secrets and the delivery log over HTTP; jobs whose events could never arrive."""

import socket
from dataclasses import replace

import pytest

from d3serve.api_keys import PUBLIC_TENANT
from d3serve.store.hooks import Delivery

pytestmark = pytest.mark.anyio
BODY = {"model": "jev-latest", "state": "hello", "questions": {"q": {"type": "noul", "instructions": "x"}}}
URL = "https://hooks.example.com/in"


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """No test asks a real name server."""
    table = {"hooks.example.com": "93.184.215.14", "private.example.com": "10.0.0.1"}
    real = socket.getaddrinfo

    def getaddrinfo(host, port, **options):
        if host.endswith("example.com"):
            if host not in table:
                raise socket.gaierror(socket.EAI_NONAME, "unknown")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (table[host], port))]
        return real(host, port, **options)

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
    "https://2130706433/", "https://private.example.com/", "https://localhost/", "ftp://hooks.example.com/",
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


async def test_a_name_that_does_not_resolve_now_may_do_so_later(client):
    answer = await client.post(
        "/v1/jobs", json=BODY | {"job": {"webhook": {"url": "https://new.example.com/"}}}
    )
    assert answer.status_code == 202


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
    assert "body" not in listed
    assert "tenant" not in listed


async def test_a_dead_delivery_is_sent_again_on_request(client, app):
    hooks = app.state.parts.hooks
    dead = Delivery("msg_1", PUBLIC_TENANT, "job_1", "job.failed", URL, None, "{}", 1.0, state="dead")
    await hooks.put(dead)
    await hooks.put(replace(dead, id="msg_2", tenant="another"))
    for query, ids in (
        ("", ["msg_1"]),
        ("?state=dead", ["msg_1"]),
        ("?state=delivered", []),
        ("?job_id=x", []),
    ):
        listed = (await client.get("/v1/webhook-deliveries" + query)).json()["data"]
        assert [one["id"] for one in listed] == ids
    assert await hooks.claim(10, 30) == []
    again = await client.post("/v1/webhook-deliveries/msg_1/redeliver")
    assert (again.status_code, again.json()["state"]) == (202, "pending")
    assert await hooks.claim(10, 30) == ["msg_1"]
    assert (await client.post("/v1/webhook-deliveries/msg_2/redeliver")).status_code == 404, (
        "another tenant's"
    )


async def test_the_secret_for_urls_in_jobs_stays_the_same(client):
    secrets = [(await client.get("/v1/webhook-secret")).json()["secret"] for _ in range(2)]
    assert secrets[0] == secrets[1]
    assert secrets[0].startswith("whsec_")
