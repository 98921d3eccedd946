"""What may be sent before the first key is looked at: bounded in length and in time."""

import contextlib
import socket
import threading
import time

import pytest
import uvicorn

from d3serve.api import protocol
from d3serve.api.protocol import MAX_HEAD_BYTES, BoundedHead

BODY = b"x" * 2**20
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(BODY)


async def echo_length(scope, receive, send):
    """Answers with the length of the body."""
    if scope["type"] != "http":
        return
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})


@pytest.fixture(params=["asyncio", "uvloop"])
def connect(request):
    """Opens connections to a server that reads heads as ours does."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        echo_length, http=BoundedHead, lifespan="off", log_config=None, loop=request.param
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
    server.should_exit = True
    thread.join()
    listener.close()


def answers(connection, *parts):
    """All that comes back until the server closes."""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            received += part
    return received


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 40 * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\nX: " + b"a" * 40 * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 8 * MAX_HEAD_BYTES,
    ],
    ids=["a line", "a header", "headers"],
)
def test_a_head_without_an_end_is_cut_off(head, connect):
    received = answers(connect(), head)
    assert received == b"" or received.startswith(b"HTTP/1.1 400")


def test_a_silent_connection_and_a_slow_head_are_closed(connect, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_WITHIN_S", 0.5)
    for first in (b"", b"GET / HTTP/1.1\r\nHost:"):
        began = time.monotonic()
        assert answers(connect(), first) == b""
        assert time.monotonic() - began < 5


def test_long_bodies_and_many_requests_on_one_connection_pass(connect, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_WITHIN_S", 0.5)
    connection = connect()
    for _ in range(3):
        connection.sendall(HEAD + b"X: " + b"a" * 30_000 + b"\r\n\r\n" + BODY[:-1])
        time.sleep(0.6)  # the body may take its time
        connection.sendall(BODY[-1:])
        received = b""
        while not received.endswith(b"%d\r\n0\r\n\r\n" % len(BODY)):
            received += connection.recv(2**16)
        assert received.startswith(b"HTTP/1.1 200")
    request = HEAD + b"\r\n" + BODY
    received = answers(connection, request * 5, HEAD + b"Connection: close\r\n\r\n" + BODY)
    assert received.count(b"HTTP/1.1 200") == 6
