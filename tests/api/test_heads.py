"""Heads that two readers could read in two ways are refused, HEAD is a GET without a body."""

import asyncio
import contextlib
import errno
import re
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from d3serve.api.app import create_app

pytestmark = pytest.mark.anyio


def answer_to(address, sent, timeout=60):
    """All that comes back for the bytes `sent` until the server closes, or has said all."""
    with socket.create_connection(
        (urlsplit(address).hostname, urlsplit(address).port), timeout
    ) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(2**16):
                received += part
        return received


TWICE = {
    "Host": "localhost", "Origin": "http://localhost", "Authorization": "Bearer x", "Content-Type": "application/json",
    "Idempotency-Key": "k", "Content-Length": "0", "Transfer-Encoding": "chunked",
}  # fmt: skip


@pytest.mark.parametrize(
    "head",
    [
        *(
            "GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + f"{name}: {value}\r\n" * 2
            for name, value in TWICE.items()
        ),
        "GET /healthz HTTP/1.1\r\n",
        "GET /healthz HTTP/0.9\r\n",
        "GET /healthz HTTP/2.0\r\nHost: localhost\r\n",
        "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n",
        "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: identity\r\n",
        "POST /v1/jobs HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n",
        "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    ],
    ids=[*TWICE, "no host", "0.9", "2.0", "gzip", "identity", "chunked 1.0", "both lengths"],
)
def test_a_head_with_two_meanings_is_refused(head, service):
    rest = b"0\r\n\r\n" if head.startswith("POST") else b""  # after a GET it would itself be refused
    received = answer_to(service, head.encode() + b"\r\n" + rest)
    assert received.startswith(b"HTTP/1.1 400"), received[:200]
    assert len(re.findall(rb"HTTP/1.1 \d{3} ", received)) == 1, "what follows it is no request"


def test_old_and_plain_heads_are_read(service):
    assert answer_to(service, b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    received = answer_to(service, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200")


def _gets(application):
    paths = application.openapi()["paths"]
    return [path.replace("{", "").replace("}", "") for path, does in paths.items() if "get" in does]


async def test_head_is_get_without_a_body_everywhere(service, settings, worker):  # noqa: ARG001 - one is ready
    async with httpx.AsyncClient(base_url=service, timeout=60) as client:
        job = {"model": "jev-latest", "state": "x", "questions": {"q": {"type": "noul", "instructions": "x"}}}
        made = (await client.post("/v1/jobs", json=job)).json()
        paths = [*_gets(create_app(settings)), made["urls"]["self"], made["urls"]["events"], "/openapi.json"]
        for path in paths:
            head = await asyncio.wait_for(client.head(path), 60)
            async with client.stream("GET", path) as get:
                assert head.status_code == get.status_code, path
                for name in ("content-type", "cache-control"):
                    assert head.headers.get(name) == get.headers.get(name), path
            assert head.content == b""
        assert (await client.head("/healthz")).status_code == 200
        assert (await client.head(made["urls"]["events"])).status_code == 200, (
            "a stream's head, not its events"
        )
        assert (await client.head("/v1/systemone")).status_code == 405


async def test_a_process_without_descriptors_says_so(app, client, monkeypatch):
    async def exhausted(*_args, **_options):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(app.state.parts.store, "get", exhausted)
    answer = await client.get("/v1/jobs/x")
    assert (answer.status_code, answer.json()["code"]) == (503, "overloaded")
    assert answer.headers["retry-after"] == "1"
