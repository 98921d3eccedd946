"""What may be sent before the first key is looked at: bounded in length and in time."""

import contextlib
import functools
import socket
import threading
import time

import pytest
import uvicorn
from service import PromptServer

from d3serve.api import bounded_connection, connections
from d3serve.api.bounded_connection import MAX_HEAD_BYTES, BoundedConnection
from d3serve.api.connections import Connections

BODY = b"x" * 2**20
LARGE = 64 * len(BODY)
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(BODY)


async def echo_length(scope, receive, send):
    """Answers with the length of the body, before it was read, or with more than fits the buffers on the way."""
    if scope["type"] != "http":
        return
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(LARGE // len(BODY) if scope["path"] == "/large" else 0):
        await send({"type": "http.response.body", "body": BODY, "more_body": True})
    await send({"type": "http.response.body", "body": b"%d" % size})


@pytest.fixture
def most():
    """How many connections the server may have."""
    return 100


@pytest.fixture
def open_connections(most):
    """The server's connections."""
    return Connections(most)


@pytest.fixture(params=["asyncio", "uvloop"])
def connect(request, open_connections, monkeypatch):
    """Opens connections to a server that reads as ours does."""
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    http = functools.partial(
        BoundedConnection, open_connections=open_connections, max_body_bytes=2 * len(BODY)
    )
    config = uvicorn.Config(
        echo_length, http=http, lifespan="off", log_config=None, loop=request.param, timeout_keep_alive=30
    )
    server = PromptServer(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(listener.getsockname(), timeout=60))
    server.end()
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
    monkeypatch.setattr(bounded_connection, "HEAD_WITHIN_S", 0.5)
    for first in (b"", b"GET / HTTP/1.1\r\nHost:"):
        began = time.monotonic()
        assert answers(connect(), first) == b""
        assert time.monotonic() - began < 20


def test_long_bodies_and_many_requests_on_one_connection_pass(connect, monkeypatch):
    monkeypatch.setattr(bounded_connection, "HEAD_WITHIN_S", 0.5)
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


CHUNKED = b"POST %s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = 64 * MAX_HEAD_BYTES


@pytest.mark.parametrize("path", [b"/", b"/early"])
@pytest.mark.parametrize(
    "rest",
    [
        b"0\r\n" + b"x: y\r\n" * (ENDLESS // 6),
        b"0\r\nx: " + b"y" * ENDLESS,
        b"1;" + b"e" * ENDLESS,
        b"1;e=e\r\na\r\n" * 2 + b"1;" + b"e" * ENDLESS,
        b"0" * ENDLESS,
        (b"1;%s\r\na\r\n" % (b"e" * 1_000)) * (ENDLESS // 1_000),
        b"%x\r\n" % (2 * ENDLESS) + b"a" * 2 * ENDLESS,
        b"zz\r\n" + b"a" * ENDLESS,
    ],
    ids=[
        "trailers",
        "a trailer",
        "an extension",
        "a later one",
        "a size",
        "extensions",
        "a chunk",
        "no size",
    ],
)
def test_what_frames_a_body_has_an_end_and_so_has_the_body(rest, path, connect, monkeypatch):
    """200 MB of trailers, sent in 5 s on one connection without a key, took 2.2 GB."""
    monkeypatch.setattr(bounded_connection, "PART_WITHIN_S", 0.5)
    received = answers(connect(), CHUNKED % path, rest, rest)
    said = (b"HTTP/1.1 200", b"HTTP/1.1 400") if path == b"/early" else b"HTTP/1.1 400"
    assert received == b"" or received.startswith(said)
    assert received.count(b"HTTP/1.1 ") <= 1, "a refusal within another answer"


def test_a_body_in_chunks_of_a_byte_passes_with_its_trailers(connect):
    received = answers(
        connect(),
        (CHUNKED % b"/").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"1\r\na\r\n" * 50_000,
        b"0\r\nx: y\r\n\r\n",
    )
    assert received.startswith(b"HTTP/1.1 200")
    assert b"50000" in received


def test_an_answer_before_the_body_arrives_whole_and_is_the_last(connect, monkeypatch):
    """The kernel throws an answer away when bytes meet a closed socket; kept open it could be fed for ever."""
    monkeypatch.setattr(bounded_connection, "PART_WITHIN_S", 0.5)
    connection = connect()
    connection.sendall(HEAD.replace(b"POST /", b"POST /early") + b"\r\n")
    received = connection.recv(2**16)
    with contextlib.suppress(ConnectionError):
        connection.sendall(BODY)
    received += answers(connection)
    head, _, _ = received.lower().partition(b"\r\n\r\n")
    assert head.startswith(b"http/1.1 200")
    assert b"connection: close" in head
    assert received.endswith(b"1\r\n0\r\n0\r\n\r\n")
    began = time.monotonic()
    stays = connect()
    stays.sendall(HEAD.replace(b"POST /", b"POST /early") + b"\r\n")
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 20:
            stays.sendall(b"x")
            time.sleep(0.02)
        pytest.fail("a connection whose answer was sent is fed for ever")


QUIET = HEAD[: HEAD.index(b"\r\n")].replace(b"POST", b"GET") + b"\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "drop"),
    [
        (QUIET, b"\r\n"),
        (b"", b"\r\n"),
        (b"GET / HTTP/1.1\r\n", b"x"),
        (HEAD + b"\r\n", b"x"),
        (CHUNKED % b"/", b"1\r\nx\r\n"),
        (CHUNKED % b"/" + b"1;", b"e"),
        (CHUNKED % b"/" + b"0\r\nx:", b"e"),
    ],
    ids=["idle", "silent", "a head", "a body", "chunks", "an extension", "a trailer"],
)
def test_single_bytes_keep_no_connection(first, drop, connect, monkeypatch):
    """One byte after an answer switched the timeout off for ever; a thousand such connections locked everybody out."""
    monkeypatch.setattr(bounded_connection, "HEAD_WITHIN_S", 0.5)
    monkeypatch.setattr(bounded_connection, "BODY_WITHIN_S", 0.5)
    connection, began = connect(), time.monotonic()
    connection.sendall(first)
    connection.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 20:
            connection.sendall(drop)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(2**16):
                    return
        pytest.fail("kept for ever")


def test_a_reader_that_does_not_read_is_cut(connect, open_connections, monkeypatch):
    monkeypatch.setattr(bounded_connection, "BODY_WITHIN_S", 0.5)
    monkeypatch.setattr(bounded_connection, "BYTES_PER_S", 2 * LARGE)
    connection = connect()
    connection.sendall(QUIET.replace(b"GET /", b"GET /large"))
    assert connection.recv(12) == b"HTTP/1.1 200", "its answer has begun"
    until = time.monotonic() + 30
    while len(open_connections) and time.monotonic() < until:
        time.sleep(0.02)
    assert len(open_connections) == 0, "what it does not take is kept for it"


def test_a_body_beyond_what_anybody_takes_is_cut_off(connect):
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (3 * len(BODY), 3 * BODY)
    assert answers(connect(), CHUNKED % b"/", body).startswith(b"HTTP/1.1 400")


def test_a_thousand_requests_in_a_packet_are_too_many(connect):
    received = answers(connect(), QUIET * 10_000)
    assert received.count(b"HTTP/1.1 200") < 1_000


def test_more_headers_than_anybody_sends_are_refused(connect):
    received = answers(connect(), b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 1_000 + b"\r\n")
    assert received.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("most", [4])
@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nHost:", QUIET], ids=["silent", "a head", "idle"])
def test_connections_that_ask_nothing_lock_nobody_out(first, connect):
    held = [connect() for _ in range(12)]
    for connection in held:
        with contextlib.suppress(ConnectionError):
            connection.sendall(first)
    received = answers(connect(), QUIET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert received.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("most", [4])
def test_who_finds_no_room_is_told_to_come_back(connect):
    busy = [connect() for _ in range(4)]
    for connection in busy:
        connection.sendall(HEAD + b"Expect: 100-continue\r\n\r\n")
        assert connection.recv(2**10).startswith(b"HTTP/1.1 100"), "its request is under way"
    received = answers(connect(), b"")
    assert received.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in received.lower()
    assert b'"overloaded"' in received


def test_a_file_may_be_longer_than_any_other_body_and_has_an_end_too(connect, monkeypatch):
    monkeypatch.setattr(bounded_connection, "MAX_UPLOAD_BYTES", 5 * len(BODY))
    for path, megabytes, passes in (("/", 4, False), ("/v1/files", 4, True), ("/v1/files", 8, False)):
        size = megabytes * len(BODY)
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
        received = answers(connect(), head.encode(), *[BODY] * megabytes)
        assert received.startswith(b"HTTP/1.1 200") == passes, (path, megabytes)
