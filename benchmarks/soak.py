"""Whether anything grows: `d3serve up` under a moderate, mixed load for a long time.

    python benchmarks/soak.py [--minutes 20] [--rate 8] [--model checkpoints/demo-d3] [--out FILE]

Jobs that are waited for, synchronous calls, webhooks to a receiver of its own, event streams, clients that hang up and
states large enough to become files come in turn, so many a second, on time whatever becomes of the ones before. Every
10 s the memory, descriptors and sockets of each process of the tree are read from /proc, and Redis' memory from itself.
A series has levelled off if its straight line through the second half rises by less than 2 % of its mean, or 1 MiB, or
two descriptors.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import redis

ROOT = Path(__file__).parents[1]
SAMPLE_S = 10.0
SHOWN_MINUTES = (1, 2, 5, 10, 15, 20, 30, 60, 120)
READY = re.compile(r"d3serve is ready: (http://\S+)")
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "Is a refund asked for?"},
    "team": {"type": "choice", "criteria": {"billing": "money", "support": None}, "instructions": "Who?"},
}
LARGE = "The parcel came late. " * 14_000  # enough bytes to be kept in a file
LONG = "The parcel came late. " * 150
Sample = tuple[
    float, dict[str, dict[str, float]]
]  # seconds since the start, and what was read of each process
KEPT = {"result_ttl_s": 60}  # what is kept for a day would rise for a day
MIB = 2**20


class Receiver(BaseHTTPRequestHandler):
    """Takes webhooks and counts what came, by its id."""

    ids: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:  # the library's name
        """Take one."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.ids[self.headers["webhook-id"]] += 1
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def receiver() -> Iterator[str]:
    """The URL of a webhook receiver on this host."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()


@contextmanager
def service(model: str, folder: Path) -> Iterator[tuple[str, int]]:
    """The address of `d3serve up` and its process id."""
    env = {**os.environ, "D3SERVE_WEBHOOK_ALLOW": '["127.0.0.0/8"]', "D3SERVE_API_PROCESSES": "2"}
    command = [
        sys.executable,
        "-m",
        "d3serve",
        "up",
        "--port",
        "0",
        "--model",
        model,
        "--data-dir",
        str(folder),
    ]
    log = folder / "up.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stderr=stderr)  # noqa: S603 # our own module
    try:
        while not (found := READY.search(log.read_text())):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield found[1], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


class TooLong(Exception):
    """What a model says of a state that is longer than it takes."""


@dataclass
class Load:
    """What is asked, and what came of it: latencies in milliseconds by kind and by minute, and what went wrong."""

    http: httpx.AsyncClient
    hook: str
    began: float = field(default_factory=time.monotonic)
    took: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    wrong: Counter[str] = field(default_factory=Counter)
    hooked: int = 0

    async def one(self, kind: str, number: int) -> None:
        """One request of a kind; never raises."""
        act: Callable[[int], Awaitable[None]] = getattr(self, kind)
        began = time.monotonic()
        try:
            await act(number)
        except Exception as error:  # counted and shown
            self.wrong[f"{kind}: {type(error).__name__} {error}"[:200]] += 1
        else:
            self.took[kind].append((began - self.began, (time.monotonic() - began) * 1000))

    async def job(self, number: int) -> None:
        """A job that is waited for."""
        await self._wait(await self._submit(number))

    async def call(self, number: int) -> None:
        """A synchronous call."""
        body = {"model": "jev-latest", "state": _state(number), "questions": QUESTIONS}
        (await self.http.post("/v1/systemone", json=body)).raise_for_status()

    async def webhook(self, number: int) -> None:
        """A job whose end is told to the receiver."""
        await self._wait(await self._submit(number, webhook={"url": self.hook}))
        self.hooked += 1

    async def stream(self, number: int) -> None:
        """A job that is followed to its end by its events."""
        job = await self._submit(number)
        async with self.http.stream("GET", f"/v1/jobs/{job}/events") as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line == "event: done":
                    return
        raise AssertionError("the stream ended before the job")

    async def hang_up(self, number: int) -> None:
        """A client that leaves while it is waited for it."""
        body = {"model": "jev-latest", "state": _state(number), "questions": QUESTIONS}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await self.http.post("/v1/systemone", json=body)

    async def large(self, number: int) -> None:
        """A state that becomes a file; a small model refuses it when it has read the file."""
        with contextlib.suppress(TooLong):
            await self._wait(await self._submit(number, LARGE, lane="offline"))

    async def long(self, number: int) -> None:
        """A state near the limit of the bundled checkpoint."""
        await self._wait(await self._submit(number, LONG))

    async def _submit(self, number: int, more: str = "", **job: Any) -> str:
        body = {
            "model": "jev-latest",
            "state": _state(number) + more,
            "questions": QUESTIONS,
            "job": job | KEPT,
        }
        posted = await self.http.post("/v1/jobs", json=body)
        posted.raise_for_status()
        return str(posted.json()["id"])

    async def _wait(self, job: str) -> None:
        polled = await self.http.get(f"/v1/jobs/{job}", params={"wait": 30})
        polled.raise_for_status()
        ended = polled.json()
        if ended["status"] == "failed" and ended["error"]["code"] == "max_tokens_exceeded":
            raise TooLong
        if ended["status"] != "succeeded":
            raise AssertionError(f"the job is {ended['status']}: {ended.get('error')}")


def _state(number: int) -> str:
    return f"Order {number % 50}: charged twice, wants the money back. "


KINDS = ("job", "call", "webhook", "call", "stream", "job", "hang_up", "webhook")
RARE_EVERY, RARE = 80, {39: "large", 79: "long"}


async def drive(load: Load, rate: float, seconds: float) -> None:
    """Send requests when they are due, then wait for the last."""
    tasks: set[asyncio.Task[None]] = set()
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, load.began + number / rate - time.monotonic()))
        kind = RARE.get(number % RARE_EVERY, KINDS[number % len(KINDS)])
        task = asyncio.create_task(load.one(kind, number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        await asyncio.wait(tasks, timeout=60)


def tree(root: int) -> dict[str, int]:
    """The processes below one, itself included, by what they are."""
    found: dict[int, tuple[int, str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            found[int(stat.parent.name)] = (parent, (stat.parent / "cmdline").read_text().replace("\0", " "))
    names: dict[str, int] = {}
    below = [root]
    for pid in below:
        below += [child for child, (parent, _) in found.items() if parent == pid]
        name = _name_of(found.get(pid, (0, ""))[1])
        if name is None:
            continue
        number = next(n for n in itertools.count(1) if f"{name} {n}" not in names)
        names[f"{name} {number}"] = pid
    return names


def _name_of(command: str) -> str | None:
    if "valkey-server" in command.partition(" ")[0] or "redis-server" in command.partition(" ")[0]:
        return "broker"
    if "spawn" in command:
        return (
            "model process"
            if "resource_tracker" not in command and "semaphore_tracker" not in command
            else None
        )
    found = re.search(r"-m d3serve (up|api|worker|webhooks|batches)\b", command)
    return found[1] if found else None


def sample(root: int, broker: redis.Redis) -> dict[str, dict[str, float]]:
    """Each process' memory in MiB, descriptors and sockets, and Redis' own count of its memory."""
    rows: dict[str, dict[str, float]] = {}
    for name, pid in tree(root).items():
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            rows[name] = {
                "rss_mib": round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 1),
                "descriptors": len(links),
                "sockets": sum(link.startswith("socket:") for link in links),
            }
    info: Any = broker.info()
    keys = sum(info.get(f"db{number}", {}).get("keys", 0) for number in range(16))
    used_mib = round(info["used_memory"] / MIB, 2)
    rows["redis"] = {"rss_mib": used_mib, "descriptors": keys, "sockets": info["connected_clients"]}
    return rows


def levelled(points: list[tuple[float, float]], least: float) -> tuple[bool, float]:
    """Whether a series rises no more in its second half, and by how much its straight line rises there."""
    late = [point for point in points if point[0] >= points[-1][0] / 2]
    if len(late) < 3:
        return True, 0.0
    slope = statistics.linear_regression(*zip(*late, strict=True)).slope
    rise = slope * (late[-1][0] - late[0][0])
    return rise < max(least, 0.02 * statistics.fmean(value for _, value in late)), round(rise, 2)


def percentiles(values: list[float]) -> list[float]:
    """The median, the 95th and the 99th percentile."""
    cuts = statistics.quantiles(values, n=100) if len(values) > 1 else values * 99
    return [round(cuts[place - 1], 1) for place in (50, 95, 99)]


def report(load: Load, samples: list[Sample]) -> dict[str, Any]:
    """Print the tables; what was measured."""
    end = samples[-1][0]
    shown = [minute for minute in SHOWN_MINUTES if minute * 60 < end - SAMPLE_S] + [end / 60]
    heads = "".join(f"{minute:>9.3g}" for minute in shown)
    print(f"\n{'RSS in MiB at minute':24}{heads}   descriptors/sockets, rise")
    verdicts: dict[str, Any] = {}
    for name in sorted({name for _, rows in samples for name in rows}):
        series = {
            what: [(at, rows[name][what]) for at, rows in samples if name in rows]
            for what in ("rss_mib", "descriptors", "sockets")
        }
        flat = {what: levelled(points, 1.0 if what == "rss_mib" else 2.0) for what, points in series.items()}
        verdicts[name] = {what: {"levelled": ok, "rise": rise} for what, (ok, rise) in flat.items()}
        cells = "".join(f"{nearest(series['rss_mib'], minute * 60):9.1f}" for minute in shown)
        last = f"{series['descriptors'][-1][1]:g}/{series['sockets'][-1][1]:g}"
        words = "level" if all(ok for ok, _ in flat.values()) else "GROWS"
        if name == "redis":
            words = (
                "used memory, keys/clients: deliveries are kept for 7 days, answers of calls for 10 minutes"
            )
        print(f"{name:24}{cells}   {last:10} {flat['rss_mib'][1]:+6.1f} {words}")
    latencies = latency_table(load, end)
    came, tries = len(Receiver.ids), sum(Receiver.ids.values())
    print(f"\nwebhooks: {load.hooked} due, {came} came, {tries} tries; wrong: {dict(load.wrong)}")
    return {
        "levelled": verdicts, "latency_ms": latencies, "wrong": dict(load.wrong),
        "webhooks": {"due": load.hooked, "came": came, "tries": tries},
    }  # fmt: skip


def nearest(points: list[tuple[float, float]], at: float) -> float:
    """The value that was read nearest to a time."""
    return min(points, key=lambda point: abs(point[0] - at))[1]


def latency_table(load: Load, end: float) -> dict[str, Any]:
    """Print and return the percentiles of each kind: of the first minute, the last and all."""
    print(f"\n{'ms p50/p95/p99':24}{'first minute':>22}{'last minute':>22}{'all':>22}   count")
    latencies: dict[str, Any] = {}
    for kind, took in sorted(load.took.items()):
        parts = {
            "first": [ms for at, ms in took if at < 60],
            "last": [ms for at, ms in took if at >= end - 60],
            "all": [ms for _, ms in took],
        }
        latencies[kind] = {part: percentiles(values) for part, values in parts.items() if values}
        cells = "".join(
            f"{'/'.join(f'{v:.0f}' for v in latencies[kind].get(part, [])):>22}" for part in parts
        )
        print(f"{kind:24}{cells}   {len(took)}")
    return latencies


async def soak(options: argparse.Namespace, url: str, pid: int, folder: Path, hook: str) -> dict[str, Any]:
    """Drive and watch."""
    samples: list[Sample] = []
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as http:
        load = Load(http, hook)
        with redis.Redis(unix_socket_path=str(folder / "valkey.sock")) as broker:
            driving = asyncio.create_task(drive(load, options.rate, options.minutes * 60))
            while not driving.done():
                samples.append((time.monotonic() - load.began, await asyncio.to_thread(sample, pid, broker)))
                await asyncio.wait({driving}, timeout=SAMPLE_S)
            driving.result()
            await asyncio.sleep(2)  # the last webhooks
            samples.append((time.monotonic() - load.began, sample(pid, broker)))
        return {**report(load, samples), "samples": samples}


def main() -> None:
    """Run it, print the tables, write the file."""
    parser = argparse.ArgumentParser(description="Whether anything grows.")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rate", type=float, default=8, help="requests a second")
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "demo-d3"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="d3serve-soak-") as name, receiver() as hook:
        folder = Path(name)
        with service(options.model, folder) as (url, pid):
            print(f"{options.minutes:g} min at {options.rate:g}/s on {platform.processor() or platform.machine()}, "
                  f"{os.cpu_count()} cores, Python {platform.python_version()}: {url}", flush=True)  # fmt: skip
            found = asyncio.run(soak(options, url, pid, folder, hook))
    if options.out:
        what = {"minutes": options.minutes, "rate_per_s": options.rate, "cores": os.cpu_count()}
        options.out.write_text(json.dumps(what | found) + "\n")


if __name__ == "__main__":
    main()
