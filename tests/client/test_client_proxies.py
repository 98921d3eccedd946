"""Proxies that the environment names: none on the way to this host, and a broken one is the party that is named."""

import http.server
import importlib.util
import threading

import pytest

from d3serve import errors
from d3serve.client import AsyncClient, Client
from d3serve.client.server import Server, is_loopback

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in VARIABLES:
        for spelled in (name, name.lower()):
            monkeypatch.delenv(spelled, raising=False)


@pytest.fixture
def proxy():
    """A proxy that answers everything with a page of its own, and keeps what it was asked."""
    asked = []

    class Page(http.server.BaseHTTPRequestHandler):
        def answer(self):
            asked.append((self.path, dict(self.headers)))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>Company gateway: please log in</html>")

        do_GET = answer  # noqa: N815 - the library's spelling

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.asked = asked
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


async def ping(kind, url):
    """What either client says of a server."""
    client = kind(url, patience_s=0)
    if kind is AsyncClient:
        async with client:
            await client.ping()
    else:
        with client:
            client.ping()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY", "http_proxy"])
async def test_a_call_of_this_host_goes_to_this_host(kind, name, service, proxy, monkeypatch):
    monkeypatch.setenv(name, proxy.url)
    await ping(kind, service)
    await ping(kind, service.replace("127.0.0.1", "localhost"))
    assert proxy.asked == []


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_socks_proxy_does_not_concern_this_host(kind, service, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5h://127.0.0.1:9")
    await ping(kind, service)


@pytest.mark.parametrize("host", [
    "localhost", "LOCALHOST.", "api.localhost", "127.0.0.1", "127.9.9.9", "127.1", "2130706433", "::1", "0.0.0.0",  # noqa: S104
    "::", "::ffff:127.0.0.1",
])  # fmt: skip
def test_this_host_has_many_names(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["d3serve.test", "10.0.0.1", "localhost.example.com", "128.0.0.1", "fe80::1", ""]
)
def test_another_host_is_another(host):
    assert not is_loopback(host)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
async def test_a_dead_proxy_is_named_as_the_party_that_failed(kind, variable, monkeypatch):
    monkeypatch.setenv(variable, "http://me:hunter2@127.0.0.1:9")
    with pytest.raises(errors.StorageUnavailable) as caught:
        await ping(kind, "http://d3serve.test")
    assert (
        "no answer from the proxy http://127.0.0.1:9 on the way to http://d3serve.test"
        in caught.value.message
    )
    assert "NO_PROXY=d3serve.test" in caught.value.message
    assert "hunter2" not in caught.value.message


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_proxy_that_answers_itself_is_named_too(kind, proxy, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    with pytest.raises(errors.InternalError, match=f"through the proxy {proxy.url}.*Company gateway"):
        await ping(kind, "http://d3serve.test")
    assert [path for path, _ in proxy.asked] == ["http://d3serve.test/healthz"]


def test_hosts_that_the_environment_excepts_are_reached_without_it(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.com,d3serve.test")
    assert Server.at("http://api.d3serve.test:8000").proxy is None
    assert Server.at("http://d3serve.example").proxy == "http://127.0.0.1:9"
    assert Server.at("https://d3serve.example").proxy is None, "it was named for http"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_proxy_that_cannot_be_used_is_one_line(kind, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "ftp://127.0.0.1:9")
    with pytest.raises(errors.InvalidRequest, match="no http, https or socks5 URL"):
        kind("http://d3serve.test")
    if importlib.util.find_spec("socksio") is None:
        monkeypatch.setenv("ALL_PROXY", "socks5h://127.0.0.1:9")
        with pytest.raises(errors.InvalidRequest, match="is a SOCKS proxy: pip install"):
            kind("http://d3serve.test")


def test_a_proxy_without_a_scheme_is_an_http_proxy(proxy, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", proxy.url.removeprefix("http://"))
    with Client("http://d3serve.test", patience_s=0) as client, pytest.raises(errors.InternalError):
        client.ping()
    assert len(proxy.asked) == 1


def test_certificates_of_the_environment_are_used_for_this_host_too(monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(errors.InvalidRequest, match="certificates"):
        Client("https://localhost")
