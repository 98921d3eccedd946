"""Bytes that are nearly HTTP at a real API: it answers or closes, stays up, and never says 500."""

import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(900)]
CASES = 4_000
AT_ONCE = 16
ANSWERS_WITHIN_S = 30
WORST_S = 1.0

STARTS = (
    b"GET /healthz HTTP/1.1\r\n", b"POST /v1/jobs HTTP/1.1\r\n", b"POST /v1/systemone HTTP/1.0\r\n",
    b"GET http://localhost/v1/jobs HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"HEAD /v1/jobs/x/events HTTP/1.1\r\n",
    b"CONNECT localhost:1 HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /%00%ff%zz?\xff HTTP/1.1\r\n",
    b"GET //v1//jobs HTTP/1.1\r\n", b"GET /v1/jobs/../../etc HTTP/1.1\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)  # fmt: skip
FIELDS = (
    b"Host: localhost", b"Host:", b"Content-Length: 2", b"Content-Length: 0", b"Content-Length: -1",
    b"Content-Length: 99999999999999999999", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
    b"Expect: 100-continue", b"Expect: x", b"Connection: close", b"Connection: keep-alive, upgrade",
    b"Upgrade: websocket", b"Upgrade: h2c", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    b"Sec-WebSocket-Version: 13", b"Content-Type: application/json", b"Content-Encoding: gzip",
    b"Prefer: wait=0", b"Idempotency-Key: \xff", b"Last-Event-ID: 9.9.9", b"X-Request-Id: " + b"x" * 300,
    b"X: \x00", b": x", b"X Y: z", b" folded: x", b"traceparent: 00-x", b"Origin: null", b"Range: bytes=0-",
    b'If-None-Match: *, W/"x"', b"Accept: */*;q=x", b"Cookie: " + b"a=b; " * 500,
)  # fmt: skip
BODIES = (
    b"", b"{}", b"0\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n", b"2;x=y\r\n{}\r\n0\r\nT: v\r\n\r\n", b"ffffffffffffffff\r\n",
    b"-1\r\n\r\n", b"2\n{}\n0\n\n", b"\r\n\r\n\r\n", b"x" * 70_000, b"\x81\x85\x00\x00\x00\x00hello",
)  # fmt: skip


def sent_by(number):
    """The pieces of case `number`: a request of odd parts, at times two, at times spoilt by chance."""
    chance = random.Random(number)  # noqa: S311 - the same every time
    data = b""
    for _ in range(chance.choice([1, 1, 2, 40])):
        lines = chance.sample(FIELDS, chance.randrange(0, 6))
        if chance.random() < 0.7:
            lines.insert(0, FIELDS[0])
        data += (
            chance.choice(STARTS)
            + b"".join(line + b"\r\n" for line in lines)
            + b"\r\n"
            + chance.choice(BODIES)
        )
    for _ in range(chance.choice([0, 0, 1, 5])):
        place = chance.randrange(len(data))
        data = (
            data[:place] + chance.choice([b"", bytes([chance.randrange(256)]), b"\r\n"]) + data[place + 1 :]
        )
    cuts = sorted(chance.randrange(len(data)) for _ in range(chance.choice([0, 0, 1, 3])))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def told(api, number):
    """What is wrong with what came back for a case, if anything."""
    received = b""
    with socket.create_connection(("127.0.0.1", api.port), ANSWERS_WITHIN_S) as connection:
        try:
            for piece in sent_by(number):
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(2**16):
                received += part
        except TimeoutError:
            return f"case {number}: no end after {ANSWERS_WITHIN_S} s; {received[:200]!r}"
        except OSError:
            pass  # it is closed already
    if received and not received.startswith(b"HTTP/1.1 "):
        return f"case {number}: {received[:200]!r}"
    return f"case {number}: {received[:2000]!r}" if b"HTTP/1.1 500" in received else None


def test_no_bytes_break_the_process_or_make_anybody_wait(start_api, probing):
    api = start_api()
    with probing(api) as probe, ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [said for said in pool.map(lambda number: told(api, number), range(CASES)) if said]
    print(f"\n{probe}; {api.descriptors()} descriptors at the end")  # noqa: T201
    assert wrong == []
    assert probe.failures == []
    assert max(probe.took_s) < WORST_S, str(probe)
    assert "Exception in ASGI" not in api.logged(), api.logged()[-3000:]
    unforeseen = [line for line in api.logged().splitlines() if "unforeseen" in line]
    assert not unforeseen, unforeseen[0]
    assert "Traceback" not in api.logged()
