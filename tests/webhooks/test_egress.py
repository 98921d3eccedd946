"""Where a webhook may go: hostile URLs never lead to a connection, however they are dressed."""

import asyncio
import ipaddress
import socket
import threading

import httpcore
import pytest

from d3serve.egress import EgressPolicy
from d3serve.errors import InvalidRequest, InvalidSettings
from d3serve.worker.outbound import GuardedBackend, Outbound, SendFailed

pytestmark = pytest.mark.anyio

HOSTILE = [
    "http://example.com/",  # not encrypted
    "ftp://example.com/", "file:///etc/passwd", "gopher://example.com/", "javascript:alert(1)", "data:text/plain,x",
    "https://", "https:///path", "//example.com/", "example.com", "", "https://[::1", "https://example.com:99999/",
    "https://user@example.com/", "https://user:secret@example.com/", "https://example.com@127.0.0.1/",
    "https://example.com:22/", "https://example.com:25/",
    "https://exam ple.com/", "https://example.com\\@127.0.0.1/", "https://example.com/\r\nX: y", "https://１２７.0.0.1/",
    "https://127。0。0。1/",
    "https://127.0.0.1/", "https://127.1/", "https://0x7f000001/", "https://2130706433/", "https://017700000001/",
    "https://0/", "https://0.0.0.0/", "https://10.0.0.1/", "https://172.16.0.1/", "https://192.168.1.1/",
    "https://100.64.0.1/", "https://169.254.169.254/latest/meta-data/", "https://198.18.0.1/", "https://224.0.0.1/",
    "https://255.255.255.255/", "https://240.0.0.1/",
    "https://[::1]/", "https://[::]/", "https://[::ffff:127.0.0.1]/", "https://[::ffff:169.254.169.254]/",
    "https://[64:ff9b::7f00:1]/", "https://[64:ff9b::a9fe:a9fe]/", "https://[2002:7f00:1::]/", "https://[fe80::1]/",
    "https://[fc00::1]/", "https://[fd00:ec2::254]/", "https://[ff02::1]/", "https://[::127.0.0.1]/",
    "https://[fec0::1]/", "https://168.63.129.16/",
    "https://a..b/", "https://.example.com/", f"https://{'a' * 64}.com/",
    "https://localhost/", "https://private.test/", "https://mixed.test/", "https://metadata.test/",
]  # fmt: skip
NAMES = {
    "private.test": ["10.0.0.1"],
    "mixed.test": ["93.184.215.14", "10.0.0.1"],
    "metadata.test": ["169.254.169.254"],
    "public.test": ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"],
}


class Watched:
    """Stands for the network: names resolve by our table, connects are recorded and refused."""

    def __init__(self, monkeypatch):
        self.connected = []
        self.lookups = []
        real = socket.getaddrinfo

        def getaddrinfo(host, port, **options):
            self.lookups.append(host)
            answers = NAMES.get(host)
            if callable(answers):
                answers = answers()
            if answers is None:
                return real(host, port, flags=0, **options) if not host.endswith(".test") else _nowhere()
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in answers]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", self._connect)

    async def _connect(self, host, port, *_):
        self.connected.append((host, port))
        raise httpcore.ConnectError("nobody here")


def _nowhere():
    raise socket.gaierror(socket.EAI_NONAME, "unknown")


@pytest.fixture
def network(monkeypatch):
    return Watched(monkeypatch)


@pytest.mark.parametrize("url", HOSTILE)
async def test_a_hostile_url_opens_no_connection(url, network):
    with pytest.raises(SendFailed, match=r"refused|cannot connect"):
        await Outbound(EgressPolicy(), 1.0).post(url, {}, b"")
    assert network.connected == []


async def test_a_public_name_is_connected_to_by_the_address_that_was_judged(network):
    with pytest.raises(SendFailed, match="cannot connect"):
        await Outbound(EgressPolicy(), 1.0).post("https://public.test/hook", {}, b"")
    assert network.connected == [(address, 443) for address in NAMES["public.test"]]
    assert network.lookups == ["public.test"], "looked up twice: a second answer could differ"


async def test_a_name_that_flips_between_judging_and_connecting_gains_nothing(network, monkeypatch):
    flips = iter([["93.184.215.14"], ["169.254.169.254"]])
    monkeypatch.setitem(NAMES, "rebinding.test", lambda: next(flips))
    outbound = Outbound(EgressPolicy(), 1.0)
    with pytest.raises(SendFailed):
        await outbound.post("https://rebinding.test/", {}, b"")
    with pytest.raises(SendFailed, match="refused"):
        await outbound.post("https://rebinding.test/", {}, b"")
    assert network.connected == [("93.184.215.14", 443)]


async def test_a_name_without_an_address_fails_in_words(network):
    with pytest.raises(SendFailed, match="cannot connect"):
        await Outbound(EgressPolicy(), 1.0).post("https://nowhere.test/", {}, b"")
    assert network.connected == []


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
async def test_public_addresses_pass(address):
    assert EgressPolicy().allows(ipaddress.ip_address(address))


async def test_the_operator_may_allow_a_network_but_never_the_metadata_service():
    policy = EgressPolicy(["10.0.0.0/8", "169.254.0.0/16", "fe80::/10"])
    assert policy.allows(ipaddress.ip_address("10.1.2.3"))
    assert policy.allows(ipaddress.ip_address("::ffff:10.1.2.3"))
    assert not policy.allows(ipaddress.ip_address("192.168.0.1"))
    for never in ("169.254.169.254", "fe80::1", "::ffff:169.254.169.254"):
        assert not policy.allows(ipaddress.ip_address(never))
    assert policy.check_url("http://10.1.2.3/").hostname == "10.1.2.3"


async def test_name_servers_that_do_not_answer_hold_up_nothing_else(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait(20) and _nowhere())
    policy = EgressPolicy()
    waiting = [asyncio.create_task(policy.resolve("slow.test", 443)) for _ in range(100)]
    try:
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "served"), 2) == "served"
    finally:
        answer.set()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_network_that_is_none_stops_the_start():
    with pytest.raises(InvalidSettings, match="D3SERVE_WEBHOOK_ALLOW"):
        EgressPolicy(["10.0.0.1/8"])


async def test_no_socket_file_is_reachable():
    with pytest.raises(httpcore.ConnectError):
        await GuardedBackend(EgressPolicy()).connect_unix_socket("/var/run/docker.sock")


async def test_without_the_guard_the_hostile_urls_do_connect(network, monkeypatch):
    """The proof that the table bites: with the judgement gone, most of it gets through."""
    monkeypatch.setattr(EgressPolicy, "allows", lambda *_: True)
    for url in HOSTILE:
        with pytest.raises(SendFailed):
            await Outbound(EgressPolicy(), 1.0).post(url, {}, b"")
    assert len(network.connected) >= 25


async def test_urls_are_refused_in_words():
    with pytest.raises(InvalidRequest, match="must not hold credentials"):
        EgressPolicy().check_url("https://a:b@example.com/")
