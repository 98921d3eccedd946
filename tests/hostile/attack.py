"""Sixty-four hostile connections at once, of every kind that needs little to be opened; run as a process of its own.

    python attack.py PORT JOB SECONDS [KIND ...]

Each connection is opened again when it is cut. What each kind got to send is printed at the end as JSON.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from hostile import odd_bodies

EACH = 8
BLOCK = 2**16
CHUNKED = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n"
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Attack:
    """What one connection does until it is cut."""

    def __init__(self, job: str) -> None:
        self.sent: Counter[str] = Counter()
        self.job = job
        self.body = odd_bodies.packed(odd_bodies.option_of_letters(15 * odd_bodies.MIB))

    async def flood(self, kind, writer, first, block):
        """Send `first`, then `block` for ever."""
        writer.write(first)
        while True:
            writer.write(block)
            await writer.drain()
            self.sent[kind] += len(block)

    async def drip(self, kind, writer, first, drop):
        """Send `first`, then `drop` twice a second."""
        writer.write(first)
        while True:
            await asyncio.sleep(0.5)
            writer.write(drop)
            await writer.drain()
            self.sent[kind] += len(drop)

    async def act(self, kind, reader, writer):
        """Do what the kind does, until the connection is cut."""
        match kind:
            case "trailers":
                await self.flood(kind, writer, CHUNKED + b"0\r\n", b"x: y\r\n" * (BLOCK // 6))
            case "extensions":
                await self.flood(kind, writer, CHUNKED + b"1;", b"e" * BLOCK)
            case "unread body":
                await self.flood(kind, writer, SIZED % (10**9, b""), b"x" * BLOCK)
            case "slow head":
                await self.drip(kind, writer, b"GET / HTTP/1.1\r\nX: ", b"x")
            case "slow body":
                await self.drip(kind, writer, SIZED % (10**7, b"") + b" " * 10**6, b" ")
            case "idle":
                await self.drip(kind, writer, GET % b"/healthz", b"\r\n")
            case "stream":
                await self.drip(kind, writer, GET % f"/v1/jobs/{self.job}/events".encode(), b"")
            case "large body":
                writer.write(SIZED % (len(self.body), b"Content-Encoding: zstd\r\n") + self.body)
                await writer.drain()
                self.sent[kind] += len(self.body)
                await reader.readuntil(b"\r\n\r\n")


KINDS = ("trailers", "extensions", "unread body", "slow head", "slow body", "idle", "stream", "large body")


async def connection(attack, kind, port, until):
    """One connection after another, each until it is cut."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            attack.sent[f"{kind}, connections"] += 1
            async with asyncio.timeout(until - time.monotonic()):
                await attack.act(kind, reader, writer)
            writer.close()
        await asyncio.sleep(0.05)


async def main(port, job, seconds, kinds):
    """All of them."""
    attack, until = Attack(job), time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for kind in kinds:
            for _ in range(EACH):
                group.create_task(connection(attack, kind, port, until))
    sys.stdout.write(json.dumps(attack.sent))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:] or KINDS))
