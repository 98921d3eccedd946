"""How fast jobs are taken: `POST /v1/jobs` on two API processes and an embedded broker, no worker.

Server, broker and load generator share this machine. The generator speaks HTTP over raw sockets, so that what
is measured is the service and not a client library.

    python benchmarks/submit.py [--seconds 5] [--connections 32]
"""

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from d3serve.broker import EmbeddedBroker
from d3serve.settings import Settings
from d3serve.supervisor import ProcessTree, bind

PROCESSES = 2
BODIES = {"1 KB, 1 question": (700, 1), "8 KB, 8 questions": (7_000, 8), "0.5 MB, 1 question": (500_000, 1)}


def request_of(state_bytes: int, questions: int) -> bytes:
    """One request, ready to be written to a socket."""
    noul = {
        "type": "noul",
        "instructions": "Does the customer ask for a refund, and by which day of the week?",
    }
    text = ("The parcel came late and the box was open. " * (state_bytes // 43 + 1))[:state_bytes]
    body = json.dumps(
        {"model": "jev-latest", "state": text, "questions": {f"question {i}": noul for i in range(questions)}}
    ).encode()
    lines = "POST /v1/jobs HTTP/1.1", "Host: d3serve", f"Content-Length: {len(body)}", "", ""
    return "\r\n".join(lines).encode() + body


async def connection(port: int, request: bytes, until: float, took: list[float]) -> None:
    """Post the request over one kept connection until the time is up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        began = time.perf_counter()
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 202 " not in head[:20]:
            raise SystemExit(head.decode())
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        took.append(time.perf_counter() - began)
    writer.close()


async def load(port: int, request: bytes, connections: int, seconds: float) -> dict[str, float]:
    """Requests a second, and their latencies in milliseconds."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    await asyncio.gather(*(connection(port, request, until, took) for _ in range(connections)))
    cuts = statistics.quantiles(took, n=100)
    return {"per_s": len(took) / seconds, "p50_ms": cuts[49] * 1000, "p99_ms": cuts[98] * 1000}


def measure(connections: int, seconds: float) -> dict[str, Any]:
    """Every body on a fresh broker and fresh API processes."""
    results = {}
    for name, (state_bytes, questions) in BODIES.items():
        tree = ProcessTree()
        with tempfile.TemporaryDirectory() as folder, bind("127.0.0.1", 0) as listener:
            broker = EmbeddedBroker(Path(folder), 8 * 2**30).start()
            port = listener.getsockname()[1]
            settings = Settings(
                redis_url=broker.url,
                max_queued_jobs=10_000_000,
                max_queued_bytes=2**40,
                log_level="warning",
                port=port,
            )
            try:
                for number in range(PROCESSES):
                    descriptor = listener.fileno()
                    tree.start(
                        f"api{number}", ["api", "--fd", str(descriptor)], settings.to_env(), (descriptor,)
                    )
                tree.wait_until(lambda port=port: _answers(port), 30, "the API")
                request = request_of(state_bytes, questions)
                load_script = [sys.executable, __file__, "--load", str(port), "--seconds", str(seconds)]
                done = subprocess.run(  # noqa: S603 - this script
                    [*load_script, "--connections", str(connections)],
                    input=request,
                    capture_output=True,
                    check=True,
                )
                results[name] = json.loads(done.stdout)
            finally:
                tree.stop()
                broker.stop()
    return results


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=2).is_success
    except httpx.TransportError:
        return False


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--load", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        request = sys.stdin.buffer.read()
        asyncio.run(load(options.load, request, options.connections, 0.5))  # warm
        print(json.dumps(asyncio.run(load(options.load, request, options.connections, options.seconds))))
        return
    print(
        f"{PROCESSES} API processes, {options.connections} connections, Python {platform.python_version()}\n"
    )
    print("| body | jobs/s | p50 ms | p99 ms |\n|---|---|---|---|")
    for name, row in measure(options.connections, options.seconds).items():
        print(f"| {name} | {row['per_s']:,.0f} | {row['p50_ms']:.1f} | {row['p99_ms']:.1f} |")


if __name__ == "__main__":
    main()
