"""Looking names up: a name server that does not answer holds up its own tenant, and costs no delivery a try."""

import asyncio
import socket
import subprocess
import sys
import threading
import time

import pytest

from d3serve.webhooks import names, outbound
from d3serve.webhooks import sender as webhooks
from d3serve.webhooks.egress import EgressPolicy
from d3serve.webhooks.names import Names, TryLater
from d3serve.webhooks.outbound import Outbound, SendFailed

pytestmark = pytest.mark.anyio


@pytest.fixture
def lookups(monkeypatch):
    """Names under `tarpit.test` are not answered until the test ends; what was asked for is noted."""
    real = socket.getaddrinfo
    asked, answer = [], threading.Event()

    def getaddrinfo(host, port, *args, **options):
        asked.append(host)
        if host.endswith("tarpit.test"):
            answer.wait(60)
        if host.endswith("good.test"):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        if host.endswith(".test"):
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return real(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield asked
    answer.set()


async def test_a_tenant_has_four_lookups_at_once_and_another_has_its_own(lookups, monkeypatch):
    monkeypatch.setattr(names, "TIMEOUT_S", 0.05)
    resolver = Names()
    for number in range(4):
        with pytest.raises(TimeoutError):
            await resolver.addresses("greedy", f"n{number}.tarpit.test", 443)
    with pytest.raises(TryLater):  # their callers gave up, but their threads are still held
        await resolver.addresses("greedy", "n5.tarpit.test", 443)
    with pytest.raises(TryLater):
        await resolver.addresses("greedy", "127.0.0.1", 443)
    monkeypatch.setattr(names, "TIMEOUT_S", 60)
    assert await resolver.addresses("acme", "127.0.0.1", 443) == ["127.0.0.1"]
    assert len(lookups) == 5


async def test_all_tenants_together_have_a_bound_too(lookups, monkeypatch):
    monkeypatch.setattr(names, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(names, "AT_ONCE", 6)
    resolver, refused = Names(), 0
    for number in range(9):
        try:
            await resolver.addresses(f"tenant {number}", "n.tarpit.test", 443)
        except TryLater:
            refused += 1
        except TimeoutError:
            continue
    assert (refused, len(lookups)) == (3, 6)


async def test_places_come_back_when_the_name_server_answers(lookups):
    resolver = Names()
    for _ in range(10):
        with pytest.raises(OSError, match="unknown"):
            await resolver.addresses("acme", "nowhere.test", 443)
    assert len(lookups) == 10
    assert not resolver._running


async def test_a_name_that_did_not_answer_is_left_alone_for_a_minute(lookups, monkeypatch):
    monkeypatch.setattr(names, "TIMEOUT_S", 0.05)
    resolver = Names()
    with pytest.raises(TimeoutError):
        await resolver.addresses("acme", "a.tarpit.test", 443)
    with pytest.raises(TryLater) as again:
        await resolver.addresses("acme", "a.tarpit.test", 443)
    assert again.value.wait_s == pytest.approx(60, abs=5)
    with pytest.raises(TimeoutError):
        await resolver.addresses("another", "a.tarpit.test", 443)
    resolver._slow = dict.fromkeys(resolver._slow, time.monotonic() - 1)
    with pytest.raises(TimeoutError):
        await resolver.addresses("acme", "b.tarpit.test", 443)
    assert set(resolver._slow) == {("acme", "b.tarpit.test")}, "what is long over is remembered"
    assert lookups == ["a.tarpit.test", "a.tarpit.test", "b.tarpit.test"]


async def test_a_host_that_is_no_name_does_not_resolve():
    with pytest.raises(OSError, match="no name"):
        await Names().addresses("acme", "a" * 64, 443)


async def test_the_log_says_that_it_was_the_name(lookups, settings, monkeypatch):  # noqa: ARG001
    monkeypatch.setattr(names, "TIMEOUT_S", 0.05)
    with pytest.raises(SendFailed, match=r"^the name a.tarpit.test did not resolve within"):
        await Outbound(EgressPolicy(), 1.0).post("acme", "https://a.tarpit.test/", {}, b"")


async def test_one_tenants_slow_name_server_stops_nobody_and_costs_no_try(
    lookups,
    monkeypatch,
    sender,  # noqa: ARG001
    hooks,
    make_receiver,
):
    monkeypatch.setattr(names, "TIMEOUT_S", 2)
    monkeypatch.setattr(webhooks, "IDLE_S", 0.02)
    for number in range(60):
        await hooks.open_delivery("greedy", "job.failed", f"https://n{number}.tarpit.test/", None, "{}")
    receiver = make_receiver()
    await hooks.open_delivery(
        "acme", "job.failed", receiver.url.replace("127.0.0.1", "good.test"), None, "{}"
    )
    await asyncio.to_thread(receiver.wait_for, 1)
    async with asyncio.timeout(60):
        while (await hooks.deliveries("acme"))[0].state == "pending":  # noqa: ASYNC110 # in Redis
            await asyncio.sleep(0.02)
    tried = [one for one in await hooks.deliveries("greedy", limit=60) if one.tries]
    assert len(tried) <= names.PER_TENANT, "waiting for a place counted as a try"
    assert len([one for one in lookups if one.endswith("tarpit.test")]) <= names.PER_TENANT


async def test_many_names_of_one_address_are_no_crowd_at_its_door(
    lookups,  # noqa: ARG001
    settings,
    make_receiver,
    monkeypatch,
):
    monkeypatch.setattr(outbound, "PER_ADDRESS", 3)
    monkeypatch.setattr(names, "PER_TENANT", 100)
    receiver = make_receiver(hang=True)
    port = receiver.url.rsplit(":", 1)[1]
    mine = Outbound(EgressPolicy(settings.webhook_allow), 30.0)

    async def post(tenant, number):
        return await mine.post(tenant, f"http://n{number}.good.test:{port}", {"Content-Length": "0"}, b"")

    hanging = [asyncio.create_task(post("greedy", number)) for number in range(3)]
    await asyncio.to_thread(receiver.wait_for, 3)
    with pytest.raises(TryLater):
        await post("greedy", 4)
    hanging.append(asyncio.create_task(post("acme", 5)))
    await asyncio.to_thread(receiver.wait_for, 4)
    receiver.hang.set()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert not mine._open


def test_a_sender_that_stops_does_not_wait_for_a_lookup(tmp_path):
    code = """
import asyncio, socket, time
from d3serve.webhooks import names
socket.getaddrinfo = lambda *_, **__: time.sleep(40)
names.TIMEOUT_S = 0.1
try:
    asyncio.run(names.Names().addresses("acme", "a.test", 443))
except TimeoutError:
    pass
"""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=39)
    assert time.monotonic() - began < 30
