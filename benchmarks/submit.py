"""How fast jobs are taken: `POST /v1/jobs` on two API processes and an embedded broker, no worker.

Server, broker and load generator share this machine. The generator speaks HTTP over raw sockets, so that what is
measured is the service and not a client library. Every request has a state of its own, unless --one-state. Rate and
latency feel whatever else the machine does; processor time a request, by process, hardly does.

    python benchmarks/submit.py [--seconds 5] [--connections 32] [--paced] [--one-state] [--bare] [--state-files]
                                [--against CHECKOUT] [--rounds 1] [--only "1 KB" "8 KB"] [--json FILE]

--against measures the API of another checkout of this repository too, in turns with this one, so that both meet the
same machine: `git worktree add ../before REVISION`, or a copy of one. Every round is printed, and then the median of
each figure; --json keeps them all.

Each connection posts its next request when it has its answer, as fast as that goes; --paced offers the rates that are
promised instead, and counts a latency from when a request was due. --bare measures the ceiling: the same generator and
the same HTTP server, whose application reads the body and says 202.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvicorn

from d3serve.up.broker import EmbeddedBroker
from d3serve.up.local import counting_together, start_apis
from d3serve.up.supervisor import ProcessTree, listening

PROCESSES = 2
BODIES = {"1 KB": (700, 1), "8 KB": (7_000, 8), "0.5 MB": (500_000, 1)}  # bytes of the state, questions
PROMISED_PER_S = {"1 KB": 1_500, "8 KB": 1_000, "0.5 MB": 400}
PLACE = "number 0000000000000000. "  # where a request differs from every other
NO_LIMITS = {
    "D3SERVE_MAX_QUEUED_JOBS": 10**7, "D3SERVE_MAX_QUEUED_JOBS_PER_TENANT": 10**7, "D3SERVE_MAX_QUEUED_BYTES": 2**40,
    "D3SERVE_MAX_KEPT_BYTES_PER_TENANT": 2**40,
}  # fmt: skip
HERE = Path(__file__).resolve().parents[1]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Measured(NamedTuple):
    """A row of the table; `round` is a number or `median`."""

    body: str
    revision: str
    round: str
    figures: dict[str, float]


def request_of(state_bytes: int, questions: int) -> bytes:
    """One request, ready to be written to a socket."""
    noul = {
        "type": "noul",
        "instructions": "Does the customer ask for a refund, and by which day of the week?",
    }
    text = PLACE + ("The parcel came late and the box was open. " * (state_bytes // 43 + 1))[:state_bytes]
    body = json.dumps(
        {"model": "jev-latest", "state": text, "questions": {f"question {i}": noul for i in range(questions)}}
    ).encode()
    lines = "POST /v1/jobs HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", "", ""
    return "\r\n".join(lines).encode() + body


def requests_like(request: bytes, *, one_state: bool) -> Iterator[bytes]:
    """The request again and again, each time with another number in its state."""
    start = request.index(PLACE.encode()) + len("number ")
    for number in itertools.count(time.time_ns() // 1000 * 1000):
        yield request if one_state else b"%s%016d%s" % (
            request[:start], number % 10**16, request[start + 16 :]
        )  # fmt: skip


async def connection(
    port: int, requests: Iterator[bytes], due: Iterator[float], until: float, took: list[float]
) -> None:
    """Post requests over one kept connection until the time is up, none before it is due."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        request = next(requests)
        if (began := next(due)) > time.perf_counter():
            await asyncio.sleep(began - time.perf_counter())
        began = began or time.perf_counter()
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 202 " not in head[:20]:
            raise SystemExit(head.decode())
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        took.append(time.perf_counter() - began)
    writer.close()


async def load(
    port: int, requests: Iterator[bytes], connections: int, seconds: float, rate: float
) -> dict[str, float]:
    """Requests a second, their latencies in milliseconds, and the generator's own time for one; rate 0 is no limit."""
    took: list[float] = []
    start, began = time.perf_counter(), time.process_time()
    due = (start + n / rate for n in itertools.count()) if rate else itertools.repeat(0.0)
    await asyncio.gather(
        *(connection(port, requests, due, start + seconds, took) for _ in range(connections))
    )
    cuts = statistics.quantiles(took, n=100)
    spent = time.process_time() - began
    return {
        "jobs": len(took), "per_s": len(took) / seconds, "p50_ms": cuts[49] * 1000, "p99_ms": cuts[98] * 1000,
        "generator_ms": spent / len(took) * 1000,
    }  # fmt: skip


def cpu_s(pids: list[int]) -> float:
    """Processor time that the processes, and those that they started, have taken so far, in seconds."""
    ticks = 0
    for pid in pids:
        row = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(row[11]) + int(row[12])
    return ticks / TICKS_PER_S + sum(cpu_s(children(pid)) for pid in pids)


def children(pid: int) -> list[int]:
    """Process ids of what a process has started, by any of its threads."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for listed in lists for child in listed.read_text().split()]


@contextmanager
def service(checkout: Path, *, state_files: bool) -> Iterator[tuple[int, list[int], list[int]]]:
    """A port with API processes of a checkout behind it, their process ids, and the broker's."""
    tree = ProcessTree()
    with tempfile.TemporaryDirectory() as folder, listening("127.0.0.1", 0, PROCESSES) as listeners:
        broker = EmbeddedBroker(Path(folder), 8 * 2**30).start()
        guard, port = children(os.getpid()), listeners[0].getsockname()[1]
        settings = {
            "D3SERVE_REDIS_URL": broker.url, "D3SERVE_PORT": str(port), "D3SERVE_LOG_LEVEL": "warning",
            **({"D3SERVE_STATE_DIR": f"{folder}/states"} if state_files else {}),
            **{name: str(most) for name, most in NO_LIMITS.items() if _is_setting(name, checkout)},
        }  # fmt: skip
        try:
            with counting_together(PROCESSES) as shared:
                start_apis(tree, listeners, settings | shared | {"PYTHONPATH": str(checkout)})
                tree.wait_until(lambda: _answers(port), 30, "the API")
                yield port, [pid for pid in children(os.getpid()) if pid not in guard], [broker.pid]
                tree.stop()
        finally:
            tree.stop()
            broker.stop()


def _is_setting(name: str, checkout: Path) -> bool:
    return name in (checkout / "docs" / "settings.md").read_text()


@contextmanager
def bare_service() -> Iterator[tuple[int, list[int], list[int]]]:
    """The same without d3serve: what HTTP alone allows."""
    with listening("127.0.0.1", 0, PROCESSES) as listeners:
        port = listeners[0].getsockname()[1]
        command = [sys.executable, __file__, "--serve-bare"]
        servers = [
            subprocess.Popen([*command, str(one.fileno())], pass_fds=[one.fileno()])  # noqa: S603 # this script
            for one in listeners
        ]
        try:
            while not _answers(port):
                time.sleep(0.05)
            yield port, [server.pid for server in servers], []
        finally:
            for server in servers:
                server.terminate()
                server.wait()


async def bare_app(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, say 202."""
    if scope["type"] != "http":
        return
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    body = str(size).encode()
    status = 202 if scope["method"] == "POST" else 200
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """Every body on fresh processes, of each checkout in turn, round by round; then the medians of the rounds."""
    checkouts = [HERE] if options.against is None else [options.against.resolve(), HERE]
    for body in options.only or BODIES:
        rounds: dict[Path, list[dict[str, float]]] = {one: [] for one in checkouts}
        for number in range(options.rounds):
            for checkout, rows in rounds.items():
                rows.append(_round(body, checkout, options))
                yield Measured(body, revision(checkout), f"{number + 1}", rows[-1])
        for checkout, rows in rounds.items():
            medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            yield Measured(body, revision(checkout), "median", medians)


def _round(body: str, checkout: Path, options: argparse.Namespace) -> dict[str, float]:
    state_bytes, questions = BODIES[body]
    running = bare_service() if options.bare else service(checkout, state_files=options.state_files)
    with running as (port, apis, brokers):
        script = [sys.executable, __file__, "--load", str(port), "--seconds", str(options.seconds)]
        script += ["--connections", str(options.connections)]
        script += ["--one-state"] * options.one_state
        script += ["--rate", str(PROMISED_PER_S[body])] * options.paced
        request = request_of(state_bytes, questions)
        subprocess.run([*script, "--seconds", "0.5"], input=request, capture_output=True, check=True)  # noqa: S603 # warm
        before = cpu_s(apis), cpu_s(brokers)
        done = subprocess.run(script, input=request, capture_output=True, check=True)  # noqa: S603 # this script
        row: dict[str, float] = json.loads(done.stdout)
        row["api_ms"] = (cpu_s(apis) - before[0]) / row["jobs"] * 1000
        row["broker_ms"] = (cpu_s(brokers) - before[1]) / row["jobs"] * 1000
        return row


def revision(checkout: Path) -> str:
    """What git calls a checkout; a copy without its history goes by the name of its folder."""
    if not (checkout / ".git").exists():  # an outer repository's revision is not ours
        return checkout.name
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603 # git
    return told.strip() or checkout.name


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=2).is_success
    except httpx.TransportError:
        return False


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--one-state", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--state-files", action="store_true")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=BODIES, nargs="+", help="these bodies alone")
    parser.add_argument("--json", type=Path, help="where every row is kept too")
    parser.add_argument("--load", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--serve-bare", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def report(options: argparse.Namespace) -> None:
    """Print a table, and keep its rows where that is asked for."""
    machine = f"{PROCESSES} processes, {options.connections} connections, {os.cpu_count()} cores"
    print(f"{machine}, Python {platform.python_version()}\n")
    print("| body | revision | round | jobs/s | p50 ms | p99 ms | API ms | broker ms | generator ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for body, which, number, row in measure(options):
        rows.append({"body": body, "revision": which, "round": number, **row})
        latency = f"{row['per_s']:,.0f} | {row['p50_ms']:.1f} | {row['p99_ms']:.1f}"
        spent = f"{row['api_ms']:.3f} | {row['broker_ms']:.3f} | {row['generator_ms']:.3f}"
        print(f"| {body} | {which} | {number} | {latency} | {spent} |", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Measure, or be the generator or the bare server of a measurement."""
    options = arguments()
    if options.serve_bare is not None:
        config = uvicorn.Config(bare_app, lifespan="off", log_config=None, access_log=False)
        uvicorn.Server(config).run(sockets=[socket.socket(fileno=options.serve_bare)])
    elif options.load is not None:
        requests = requests_like(sys.stdin.buffer.read(), one_state=options.one_state)
        measured = load(options.load, requests, options.connections, options.seconds, options.rate)
        print(json.dumps(asyncio.run(measured)))
    else:
        report(options)


if __name__ == "__main__":
    main()
