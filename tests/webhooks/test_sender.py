"""Deliveries to a receiver on loopback: signed, repeated, given up, and never in each other's way."""

import asyncio
import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import standardwebhooks
from webhooks.deliveries import delivery

from d3serve.webhooks import sender as webhooks
from d3serve.webhooks.egress import EgressPolicy
from d3serve.webhooks.outbound import Outbound
from d3serve.webhooks.outbox import Try

pytestmark = pytest.mark.anyio


async def settled(hooks, count=1, *, state=None, tries=0):
    """The tenant's deliveries once `count` of them have left `pending` (or are in `state` with `tries`)."""
    deadline = time.monotonic() + 60
    while True:
        found = [
            one
            for one in await hooks.deliveries("acme")
            if (one.state == state if state else one.state != "pending") and len(one.tries) >= tries
        ]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, await hooks.deliveries("acme")
        await asyncio.sleep(0.02)


@pytest.fixture
def soon(monkeypatch):
    """Every retry comes within a fifth of a second."""
    monkeypatch.setattr(webhooks, "SCHEDULE_S", (0.1,) * 9)
    monkeypatch.setattr(webhooks, "IDLE_S", 0.02)


@pytest.mark.usefixtures("sender", "soon")
async def test_an_event_arrives_as_signed_with_the_result_in_it(finish_job, hooks, make_receiver):
    receiver = make_receiver()
    job_id = await finish_job({"url": receiver.url})
    (delivery,) = await settled(hooks)
    (got,) = receiver.got
    secret = await hooks.tenant_secret("acme")
    standardwebhooks.Webhook(secret).verify(got.body, {k.lower(): v for k, v in got.headers.items()})
    assert got.event["type"] == "job.succeeded"
    assert got.event["data"]["id"] == job_id
    assert got.event["data"]["metadata"] == {"case": "7"}
    assert got.event["data"]["result"]["answers"] == {"q0": {"type": "noul", "noul": 0.5}}
    assert b"secret" not in got.body
    assert got.headers["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert (delivery.state, delivery.tries[0].status) == ("delivered", 200)


@pytest.mark.usefixtures("sender", "soon")
async def test_a_large_result_stays_behind_its_address(finish_job, hooks, make_receiver):
    receiver = make_receiver()
    job_id = await finish_job({"url": receiver.url}, size=900)
    await settled(hooks)
    assert len(receiver.got[0].body) < 20_000
    assert "result" not in receiver.got[0].event["data"]
    assert receiver.got[0].event["data"]["urls"]["result"] == f"/v1/jobs/{job_id}/result"


@pytest.mark.usefixtures("sender", "soon")
async def test_failures_are_tried_again_with_one_id_and_the_same_bytes(finish_job, hooks, make_receiver):
    receiver = make_receiver((500, {}), (301, {"Location": "http://127.0.0.1:1/"}), (413, {}))
    await finish_job({"url": receiver.url}, failed=True)
    (delivery,) = await settled(hooks)
    assert [one.status for one in delivery.tries] == [500, 301, 413, 200]
    assert [one.error for one in delivery.tries][:3] == [
        f"the receiver answered {s}" for s in (500, 301, 413)
    ]
    assert len({got.headers["webhook-id"] for got in receiver.got}) == 1
    assert len({got.body for got in receiver.got}) == 1
    assert receiver.got[0].event["data"]["error"]["code"] == "device_error"


@pytest.mark.usefixtures("sender", "soon")
async def test_ten_tries_and_it_is_dead_until_redelivered(finish_job, hooks, make_receiver, monkeypatch):
    monkeypatch.setattr(webhooks, "BREAKER_FAILURES", 100)
    receiver = make_receiver(*[(500, {})] * 10)
    await finish_job({"url": receiver.url})
    (dead,) = await settled(hooks, state="dead")
    assert len(dead.tries) == 10
    await hooks.redeliver(dead.id, "acme")
    (delivered,) = await settled(hooks, state="delivered")
    assert len(delivered.tries) == 11
    assert receiver.got[-1].headers["webhook-id"] == receiver.got[0].headers["webhook-id"]


@pytest.mark.usefixtures("sender", "soon")
async def test_410_disables_the_endpoint_and_what_comes_later(finish_job, hooks, make_receiver):
    receiver = make_receiver((410, {}))
    endpoint = await hooks.add_endpoint("acme", receiver.url, [])
    await finish_job({"endpoint_id": endpoint.id})
    await settled(hooks, state="disabled")
    assert "410" in (await hooks.endpoint("acme", endpoint.id)).disabled_reason
    await finish_job({"endpoint_id": endpoint.id})
    await settled(hooks, 2, state="disabled")
    assert len(receiver.got) == 1


async def test_a_410_of_an_address_that_the_endpoint_has_left_disables_nothing(hooks):
    endpoint = await hooks.add_endpoint("acme", "https://new.example/", [])
    old = replace(delivery(), tenant="acme", endpoint_id=endpoint.id, url="https://old.example/")
    await webhooks.Sender(hooks, Outbound(EgressPolicy(), 1.0))._disable(old)
    assert (await hooks.endpoint("acme", endpoint.id)).disabled_reason is None


async def test_what_another_sender_has_settled_since_it_was_claimed_is_not_sent(
    hooks, settings, make_receiver
):
    receiver = make_receiver()
    made = await hooks.open_delivery("acme", "job.failed", receiver.url, None, "{}")
    (claimed,) = await hooks.claim(1, 30)
    await hooks.settle(replace(made, state="dead", next_try_at=None))
    policy = EgressPolicy(settings.webhook_allow)
    await webhooks.Sender(hooks, Outbound(policy, 1.0))._settle(claimed)
    assert receiver.got == []


@pytest.mark.usefixtures("sender", "soon")
async def test_an_endpoint_gets_the_events_it_wants_signed_by_both_secrets(finish_job, hooks, make_receiver):
    receiver = make_receiver()
    endpoint = await hooks.add_endpoint("acme", receiver.url, ["job.failed"])
    rotated = await hooks.rotate_secret("acme", endpoint.id)
    await finish_job({"endpoint_id": endpoint.id})
    await finish_job({"endpoint_id": endpoint.id}, failed=True)
    await settled(hooks)
    (got,) = receiver.got
    assert got.event["type"] == "job.failed"
    headers = {name.lower(): value for name, value in got.headers.items()}
    for secret in (endpoint.secrets[0][0], rotated.secrets[0][0]):
        standardwebhooks.Webhook(secret).verify(got.body, headers)


@pytest.fixture
async def patient_sender(sender_of, hooks, settings):
    """A sender that waits for a receiver longer than a test takes, so that no place comes free by itself."""
    async with sender_of(hooks, Outbound(EgressPolicy(settings.webhook_allow), 90)) as running:
        yield running


@pytest.mark.usefixtures("patient_sender", "soon")
async def test_a_receiver_that_hangs_delays_no_other(finish_job, hooks, make_receiver):
    hanging, good = make_receiver(hang=True), make_receiver()
    for _ in range(12):
        await finish_job({"url": hanging.url})
    await asyncio.to_thread(hanging.wait_for, webhooks.PER_RECEIVER)
    await finish_job({"url": good.url})
    (delivered,) = await settled(hooks, state="delivered")
    assert delivered.url == good.url
    assert len(hanging.got) == webhooks.PER_RECEIVER, "one receiver takes all the places"
    assert not any(one.tries for one in await hooks.deliveries("acme") if one.url == hanging.url)
    hanging.hang.set()


@pytest.mark.usefixtures("sender", "soon")
async def test_after_five_failures_a_receiver_is_left_alone_for_a_while(
    finish_job, hooks, make_receiver, monkeypatch
):
    monkeypatch.setattr(webhooks, "BREAKER_OPEN_S", 0.6)
    receiver = make_receiver(*[(500, {})] * 5)
    await finish_job({"url": receiver.url})
    (delivery,) = await settled(hooks)
    assert len(delivery.tries) == 6, "waiting for the breaker is no try"
    *_, fifth, last = delivery.tries
    assert last.at - fifth.at > 0.5, "the breaker did not open"


async def test_of_many_receivers_the_idle_ones_are_forgotten(hooks, monkeypatch):
    monkeypatch.setattr(webhooks, "MAX_RECEIVERS", 3)
    sender = webhooks.Sender(hooks, Outbound(EgressPolicy(), 1.0))
    shut, busy = (sender._receiver(replace(delivery(), url=f"https://{name}/")) for name in ("shut", "busy"))
    shut.closed_until, busy.sending = time.monotonic() + 60, 1
    for number in range(20):
        sender._receiver(replace(delivery(), url=f"https://idle-{number}/"))
        assert len(sender._receivers) <= 3
    assert sender._receiver(replace(delivery(), url="https://shut/")) is shut
    assert sender._receiver(replace(delivery(), url="https://busy/")) is busy


async def test_a_receiver_is_one_however_it_is_spelled_and_through_whichever_endpoint(hooks):
    sender = webhooks.Sender(hooks, Outbound(EgressPolicy(), 1.0))

    def of(url, **changes):
        return sender._receiver(replace(delivery(), url=url, **changes))

    first = of("https://example.com/a")
    for url in ("https://EXAMPLE.com/b", "https://example.com.:443/", "https://example.com:443/?q"):
        assert of(url, endpoint_id="ep_1") is first
    assert of("https://example.com:8443/") is not first
    assert of("https://example.com/a", tenant="another") is not first


@pytest.mark.usefixtures("sender", "soon")
async def test_nobody_there_and_no_answer_are_told_apart_in_the_log(finish_job, hooks, make_receiver):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    await finish_job({"url": f"http://127.0.0.1:{port}/"})
    (refused,) = await settled(hooks, state="pending", tries=1)
    assert "cannot connect" in refused.tries[0].error
    await finish_job({"url": make_receiver(hang=True).url})
    (silent,) = [one for one in await settled(hooks, 2, state="pending", tries=1) if one.id != refused.id]
    assert "no answer within 1 s" in silent.tries[0].error


@pytest.mark.usefixtures("patient_sender", "soon")
async def test_no_tenant_takes_all_the_places_or_shuts_a_receiver_for_another(
    hooks, make_receiver, monkeypatch
):
    monkeypatch.setattr(webhooks, "PER_TENANT", 2)
    hanging, shared = [make_receiver(hang=True) for _ in range(4)], make_receiver(*[(500, {})] * 5)
    at_once, post = Counter(), Outbound.post

    async def counted(outbound, tenant, url, *rest):
        at_once["now"] += url != shared.url
        at_once["most"] = max(at_once["most"], at_once["now"])
        try:
            return await post(outbound, tenant, url, *rest)
        finally:
            at_once["now"] -= url != shared.url

    monkeypatch.setattr(Outbound, "post", counted)
    for receiver in hanging:
        await hooks.open_delivery("greedy", "job.failed", receiver.url, None, "{}")
    async with asyncio.timeout(60):  # any two: what falls due in one millisecond has no order
        while sum(bool(one.got) for one in hanging) < 2:  # noqa: ASYNC110 # in other threads
            await asyncio.sleep(0.01)
    await hooks.open_delivery("clumsy", "job.failed", shared.url, None, "{}")
    await asyncio.to_thread(shared.wait_for, 5)
    await hooks.open_delivery("acme", "job.failed", shared.url, None, "{}")
    await settled(hooks, state="delivered")
    assert not any(one.tries for one in await hooks.deliveries("greedy")), "it waited for their places"
    assert at_once["most"] == 2
    for receiver in hanging:
        receiver.hang.set()


@pytest.mark.parametrize("url", ["https://a..b/", f"https://{'a' * 64}.com/"])
@pytest.mark.usefixtures("sender", "soon")
async def test_a_host_that_can_be_no_name_is_a_failed_try_and_not_tried_for_ever(url, hooks):
    await hooks.open_delivery("acme", "job.failed", url, None, "{}")
    (delivery,) = await settled(hooks, state="pending", tries=3)
    assert delivery.tries[0].error.startswith("refused: must name a host")


@pytest.mark.usefixtures("soon")
async def test_an_address_that_was_allowed_at_submit_is_judged_again_at_every_try(
    finish_job, hooks, sender_of
):
    closed = Outbound(EgressPolicy(), 1.0)
    await finish_job({"url": "https://localhost:8443/"})
    async with sender_of(hooks, closed):
        (delivery,) = await settled(hooks, state="pending", tries=1)
    assert delivery.tries[0].error.startswith("refused: 127.0.0.1 is no address")


RUN = """
import os, signal, sys
from d3serve.settings import Settings
from d3serve.webhooks import main, outbox, sender
sender.SCHEDULE_S, sender.LEASE_SPARE_S, main.ANSWER_WITHIN_S = (0.3,) * 9, 0.5, 2.0

async def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

for step in sys.argv[1:]:
    setattr(outbox.HookStore, step, die)
sys.exit(main.webhooks_main(Settings.load()))
"""


@pytest.fixture
def start(settings):
    """Starts a sender as a process, which dies on its way to the steps named; it has 2 s for a receiver."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("D3SERVE_")}
    processes = []

    def run(*steps):
        command = [sys.executable, "-c", RUN, *steps]
        processes.append(subprocess.Popen(command, env=clean | settings.to_env(), stderr=subprocess.DEVNULL))
        return processes[-1]

    yield run
    for process in processes:
        process.terminate()
    assert {process.wait(timeout=60) for process in processes} <= {0, -signal.SIGKILL}


@pytest.mark.parametrize(("step", "sent"), [("delivery", 0), ("target", 0), ("settle", 1)])
async def test_a_sender_killed_on_its_way_leaves_the_delivery_to_the_next(
    step, sent, finish_job, hooks, make_receiver, start
):
    """Claimed, about to send, sent and not yet written down."""
    receiver = make_receiver((500, {}))
    await finish_job({"url": receiver.url})
    killed = start(step)
    assert await asyncio.to_thread(killed.wait, 60) == -signal.SIGKILL
    assert len(receiver.got) == sent
    (pending,) = await hooks.deliveries("acme")
    assert (pending.state, pending.tries) == ("pending", ())
    start()
    (delivery,) = await settled(hooks)
    assert delivery.state == "delivered"
    assert {(got.headers["webhook-id"], got.body) for got in receiver.got} == {
        (delivery.id, receiver.got[0].body)
    }


async def test_a_sender_that_was_away_for_a_day_goes_on_where_it_was(
    finish_job, hooks, make_receiver, sender_of
):
    receiver = make_receiver()
    await finish_job({"url": receiver.url})
    (due,) = await hooks.deliveries("acme")
    yesterday = await hooks.now_s() - 86_400
    tried = tuple(Try(yesterday, 503, "the receiver answered 503", 1) for _ in range(9))
    await hooks.settle(replace(due, tries=tried, next_try_at=yesterday))
    async with sender_of(hooks):
        (delivery,) = await settled(hooks)
    assert (delivery.state, len(delivery.tries)) == ("delivered", 10)


class Endless(http.server.BaseHTTPRequestHandler):
    """Accepts, and goes on answering until nobody listens."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.server.written += self.wfile.write(b"x" * 4096)

    def log_message(self, *_):
        pass


@pytest.mark.usefixtures("sender", "soon")
async def test_a_receiver_that_answers_without_end_is_heard_and_left(hooks):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        server.written = 0
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        await hooks.open_delivery("acme", "job.failed", url, None, "{}")
        (delivery,) = await settled(hooks)
        server.shutdown()
    assert (delivery.state, delivery.tries[0].status) == ("delivered", 200)
    assert server.written < 64 * 2**20
