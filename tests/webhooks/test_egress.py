"""Where a webhook may go: hostile URLs never lead to a connection, however they are dressed."""

import ipaddress
import socket

import httpcore
import pytest

from d3serve.errors import InvalidRequest, InvalidSettings
from d3serve.webhooks.egress import EgressPolicy, destination
from d3serve.webhooks.outbound import Outbound, SendFailed

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
    "https://192.0.0.192/", "https://192.0.0.8/", "https://192.88.99.1/", "https://[3fff::1]/", "https://[2001:db8::1]/",
    "https://[64:ff9b:1::7f00:1]/", "https://[64:ff9b:1:7f00:0:100::]/", "https://[2001:0:808:808::80ff:fffe]/",
    "https://[2606:4700::5efe:a00:1]/", "https://[2606:4700::200:5efe:a9fe:a9fe]/", "https://[2002:808:808::]/",
    "https://[fd20:ce::254]/", "https://100.100.100.200/", "https://[5f00::1]/", "https://[4000::1]/",
    "https://127.0.0.1./", "https://0x7f.1/", "https://LOCALHOST./", "https://a.localhost/", "https://[fe80::1%25lo]/",
    "https://example.com:0/", "https://exa%6Dple.com/",
    "https://a..b/", "https://.example.com/", f"https://{'a' * 64}.com/",
    "https://localhost/", "https://private.test/", "https://mixed.test/", "https://metadata.test/",
    "https://special.test/",
]  # fmt: skip
NAMES = {
    "private.test": ["10.0.0.1"],
    "mixed.test": ["93.184.215.14", "10.0.0.1"],
    "metadata.test": ["169.254.169.254"],
    "special.test": ["3fff::1"],
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
                return real(host, port, **options) if not host.endswith(".test") else _nowhere()
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
        await Outbound(EgressPolicy(), 1.0).post("acme", url, {}, b"")
    assert network.connected == []


async def test_a_public_name_is_connected_to_by_the_address_that_was_judged(network):
    with pytest.raises(SendFailed, match="cannot connect"):
        await Outbound(EgressPolicy(), 1.0).post("acme", "https://public.test/hook", {}, b"")
    assert network.connected == [(address, 443) for address in NAMES["public.test"]]
    assert network.lookups == ["public.test"], "looked up twice: a second answer could differ"


async def test_a_name_that_flips_between_judging_and_connecting_gains_nothing(network, monkeypatch):
    flips = iter([["93.184.215.14"], ["169.254.169.254"]])
    monkeypatch.setitem(NAMES, "rebinding.test", lambda: next(flips))
    outbound = Outbound(EgressPolicy(), 1.0)
    with pytest.raises(SendFailed):
        await outbound.post("acme", "https://rebinding.test/", {}, b"")
    with pytest.raises(SendFailed, match="refused"):
        await outbound.post("acme", "https://rebinding.test/", {}, b"")
    assert network.connected == [("93.184.215.14", 443)]


async def test_a_name_that_leads_inside_and_one_that_leads_nowhere_look_alike(network):
    told = set()
    for host in ("nowhere.test", "private.test", "mixed.test"):
        with pytest.raises(SendFailed) as failed:
            await Outbound(EgressPolicy(), 1.0).post("acme", f"https://{host}/", {}, b"")
        told.add(str(failed.value).replace(host, "*"))
    (one,) = told
    assert "the name * leads to no address that webhooks may reach; the setting D3SERVE_WEBHOOK_ALLOW" in one
    assert network.connected == []


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
async def test_public_addresses_pass(address):
    assert EgressPolicy().allows(ipaddress.ip_address(address))


ELSEWHERE = [
    "169.254.169.254", "fe80::1", "::ffff:169.254.169.254", "fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe",
    "100.100.100.200", "192.0.0.192", "168.63.129.16", "64:ff9b::a9fe:a9fe", "64:ff9b:1::6464:64c8",
    "64:ff9b:1:a9fe:a9:fe00::", "2002:a9fe:a9fe::", "2606:4700::5efe:a9fe:a9fe", "::a9fe:a9fe",
]  # fmt: skip


@pytest.mark.parametrize("address", ELSEWHERE)
async def test_no_allowed_network_opens_a_metadata_service(address):
    everything = EgressPolicy(["0.0.0.0/0", "::/0"])
    assert not everything.allows(ipaddress.ip_address(address))
    assert everything.allows(ipaddress.ip_address("10.0.0.1"))


async def test_the_operator_may_allow_a_network():
    policy = EgressPolicy(["10.0.0.0/8"])
    assert policy.allows(ipaddress.ip_address("10.1.2.3"))
    assert policy.allows(ipaddress.ip_address("::ffff:10.1.2.3"))
    assert not policy.allows(ipaddress.ip_address("192.168.0.1"))
    assert policy.allows(ipaddress.ip_address("8.8.8.8"))


async def test_plain_http_goes_into_the_allowed_networks_only(network):
    outbound = Outbound(EgressPolicy(["10.0.0.0/8"]), 1.0)
    for url in ("http://8.8.8.8/", "http://public.test/", "http://mixed.test/"):
        with pytest.raises(SendFailed, match="that webhooks may reach"):
            await outbound.post("acme", url, {}, b"")
    assert network.connected == []
    for url in ("http://private.test/", "http://10.0.0.7/", "https://8.8.8.8/"):
        with pytest.raises(SendFailed, match="cannot connect"):
            await outbound.post("acme", url, {}, b"")
    assert network.connected == [("10.0.0.1", 80), ("10.0.0.7", 80), ("8.8.8.8", 443)]


async def test_what_is_public_is_our_own_list_whatever_python_says(monkeypatch):
    monkeypatch.setattr(ipaddress.IPv4Address, "is_global", True)
    monkeypatch.setattr(ipaddress.IPv6Address, "is_global", True)
    for address in ("192.0.0.8", "192.88.99.1", "10.0.0.1", "3fff::1", "fc00::1", "5f00::1", "2001:db8::1"):
        assert not EgressPolicy().allows(ipaddress.ip_address(address)), address


@pytest.mark.parametrize(
    ("spellings", "receiver"),
    [
        (["https://example.com/", "HTTPS://EXAMPLE.com/x", "https://example.com./", "https://example.com:443/",
          "https://Example.Com.:443/?q", "https://example.com:/"], ("example.com", 443)),
        (["http://127.0.0.1/", "http://127.1/", "http://0x7f.1:80", "http://[::ffff:127.0.0.1]/", "http://localhost/",
          "http://LocalHost.", "http://2130706433"], ("127.0.0.1", 80)),
        (["https://[2606:4700::1]/", "https://[2606:4700:0:0::1]:443/", "https://[2606:4700:0:0:0:0:0:1]"],
         ("2606:4700::1", 443)),
    ],
)  # fmt: skip
async def test_a_receiver_has_one_spelling(spellings, receiver):
    assert {destination(url)[1:3] for url in spellings} == {receiver}


async def test_a_network_that_is_none_stops_the_start():
    with pytest.raises(InvalidSettings, match="D3SERVE_WEBHOOK_ALLOW"):
        EgressPolicy(["10.0.0.1/8"])


async def test_without_the_guard_the_hostile_urls_do_connect(network, monkeypatch):
    """The proof that the table bites: with the judgement gone, most of it gets through."""
    monkeypatch.setattr(EgressPolicy, "allows", lambda *_, **__: True)
    outbound = Outbound(EgressPolicy(), 1.0)
    for url in HOSTILE:
        with pytest.raises(SendFailed):
            await outbound.post("acme", url, {}, b"")
    assert len(network.connected) >= 40


async def test_urls_are_refused_in_words():
    with pytest.raises(InvalidRequest, match="must not hold credentials"):
        EgressPolicy().check_url("https://a:b@example.com/")


@pytest.mark.parametrize(
    "url", ["http://receiver.test/", "https://127.0.0.1:9000/", "https://localhost/", "https://10.1.2.3/"]
)
def test_a_refusal_that_a_setting_can_lift_names_the_setting(url):
    with pytest.raises(InvalidRequest, match=r"D3SERVE_WEBHOOK_ALLOW, as '\[\"10\.0\.0\.0/8\"\]'"):
        EgressPolicy().check_url(url)


def test_a_refusal_that_no_setting_can_lift_names_none():
    with pytest.raises(InvalidRequest) as caught:
        EgressPolicy().check_url("https://169.254.169.254/latest")
    assert "D3SERVE" not in caught.value.message
