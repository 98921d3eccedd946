"""A whole service but for HTTP: an embedded broker, real Celery workers with the fake engine, the job table."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from processes import is_alive
from service import serving

from d3serve.schemas import DecisionRequest, JobOptions
from d3serve.schemas.questions import NoulQuestion
from d3serve.settings import Settings
from d3serve.store.connect import open_sync
from d3serve.store.jobs import JobStore
from d3serve.store.keys import Keys
from d3serve.up.broker import EmbeddedBroker
from d3serve.wake.celery_app import Waker

__all__ = ["serving"]

# What no setting is, and tests choose all the same.
CONSTANTS = {
    "lease_s": "d3serve.store.turns:TurnStore.lease_s",
    "max_batch_questions": "d3serve.store.turns:TurnStore.max_batch_questions",
    "turn_limit_s": "d3serve.wake.celery_app:TURN_LIMIT_S",
}
LEASE_S = 4
WORKER = Path(__file__).parents[1] / "worker_process.py"
IN_TIME_S = 90  # for anything that must come to pass, however busy the machine is: a start takes 2 s alone


class Worker:
    """A worker process that a test may kill."""

    def __init__(self, settings, log, constants, prelude="", environ=None):
        env = {name: value for name, value in os.environ.items() if not name.startswith("D3SERVE_")}
        env |= environ or {}
        self.log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), json.dumps(constants), prelude], stderr=stderr,
                stdout=subprocess.DEVNULL, env={**env, **settings.to_env()}, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid

    def signal(self, number):
        self._process.send_signal(number)

    def wait(self, timeout=IN_TIME_S):
        return self._process.wait(timeout)

    def alive(self):
        return self._process.poll() is None

    async def events(self, name, count=1):
        """Log events of a name, once there are so many of them."""
        async with asyncio.timeout(IN_TIME_S):
            while True:
                lines = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
                found = [event for event in map(json.loads, lines) if event["event"] == name]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.02)

    def libraries(self):
        """Shared libraries that the main process has loaded."""
        return {line.split()[-1] for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines()}

    def kill(self):
        """SIGKILL to the whole group: the machine is gone."""
        if self.alive():
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


class Service:
    """What a test talks to."""

    def __init__(self, settings, jobs, folder):
        self.settings, self.jobs = settings, jobs
        self.redis = open_sync(settings)
        self.trace = folder / "trace.jsonl"
        self._folder = folder
        self._count = itertools.count()
        self.workers = []

    def key(self, *parts):
        return Keys(self.settings.namespace)(*parts)

    def start_worker(self, model="", *, prelude="", environ=None, stderr=None, **changes):
        """Start a worker; `model` holds more options of the fake engine, `prelude` code that breaks it."""
        engine = f"fake:?faults=1&trace={self.trace}&{model}".rstrip("&")
        constants = {CONSTANTS[name]: changes.pop(name) for name in CONSTANTS if name in changes}
        constants = {CONSTANTS["lease_s"]: LEASE_S} | constants
        settings = self.settings.model_copy(update={"model": engine, **changes})
        log = Path(stderr or self._folder / f"worker-{next(self._count)}.log")
        worker = Worker(settings, log, constants, prelude, environ)
        self.workers.append(worker)
        return worker

    async def ready(self, count=1):
        """Wait until so many workers have loaded their model; their records."""
        async with asyncio.timeout(IN_TIME_S):
            while len(ready := [w for w in await self.jobs.workers() if w.ready]) < count:  # noqa: ASYNC110 # in Redis
                await asyncio.sleep(0.05)
        return ready

    def child(self, worker):
        """The process id of a worker's child."""
        [name] = [w for w in self.redis.zrange(self.key("workers"), 0, -1) if f"-{worker.pid}-" in w]
        return int(self.redis.hget(self.key("worker", name), "child"))

    async def submit_many(self, states, **options):
        """Submit a one-question job for each state; their ids."""
        return [await self.submit(state, **options) for state in states]

    async def finished(self):
        """How often a final status was written, by status; a second commit would count twice."""
        return dict((await self.jobs.stats()).finished)

    async def submit(self, state="s", questions=1, *, wake=True, tenant="me", **options):
        asked = {f"q{i}": NoulQuestion(type="noul", instructions=f"is {i} so?") for i in range(questions)}
        request = DecisionRequest(model="fake", state=state, questions=asked, job=JobOptions(**options))
        submitted = await self.jobs.submit(request, tenant=tenant)
        if wake and submitted.wake:
            await asyncio.to_thread(self.send_wake, submitted.lane)
        return submitted.job_id

    async def finish(self, job_id, timeout_s=IN_TIME_S):
        """Wait for a job; its record."""
        job = await self.jobs.wait(job_id, "me", timeout_s)
        assert job.done, f"{job_id} is still {job.status}"
        return job

    async def finish_all(self, ids, timeout_s=IN_TIME_S):
        return await asyncio.gather(*(self.finish(job_id, timeout_s) for job_id in ids))

    async def running(self, job_id):
        """Wait until a worker has started the job."""
        async for job in self.jobs.watch(job_id, "me"):
            if job.status == "running" and job.progress.stage == "deciding":
                return job
        raise AssertionError("the job ended before it was seen running")

    async def told(self, job_id):
        """Wait until a running job's share of work and time left are known."""
        async for job in self.jobs.watch(job_id, "me"):
            if job.progress.eta_s is not None:
                return job
        raise AssertionError("the job ended before it told of its progress")

    async def at_work(self):
        """Wait until a turn runs; the worker whose it is, and the process id of the child that runs it."""
        async with asyncio.timeout(IN_TIME_S):
            while True:
                for lease in self.redis.zrange(self.key("leases"), 0, -1):
                    name, pid = self.redis.hmget(self.key("lease", lease), "worker", "pid")
                    worker = next(
                        (w for w in self.workers if name and f"-{w.pid}-" in name and w.alive()), None
                    )
                    if worker and is_alive(pid):
                        return worker, int(pid)
                await asyncio.sleep(0.005)

    def passes(self):
        """What the fake engines did, pass by pass."""
        return (
            [json.loads(line) for line in self.trace.read_text().splitlines()] if self.trace.exists() else []
        )

    def prefills(self):
        """How many times a state was read."""
        return sum(len(a_pass["fresh"]) for a_pass in self.passes())

    def states_on_two_workers(self):
        """States that two processes had in a pass at the same time."""
        spans = [(s, p["pid"], p["began"], p["ended"]) for p in self.passes() for s in p["states"]]
        pairs = itertools.combinations(spans, 2)
        return {a[0] for a, b in pairs if a[0] == b[0] and a[1] != b[1] and a[2] < b[3] and b[2] < a[3]}

    async def settled(self):
        """Wait until no lease is left, so that counters can be compared."""
        async with asyncio.timeout(IN_TIME_S):
            while self.redis.zcard(self.key("leases")):  # noqa: ASYNC110 # in Redis
                await asyncio.sleep(0.05)


@pytest.fixture(scope="session")
def session_broker(tmp_path_factory):
    broker = EmbeddedBroker(tmp_path_factory.mktemp("broker"), 2**28).start()
    yield broker
    broker.stop()


@pytest.fixture
def redis_url(session_broker):
    """A test with a broker of its own overrides this."""
    with redis.Redis.from_url(session_broker.url) as client:
        client.flushall()
    return session_broker.url


@pytest.fixture
async def service(redis_url, tmp_path):
    settings = Settings(redis_url=redis_url)
    async with JobStore.open(settings) as jobs:
        service = Service(settings, jobs, tmp_path)
        service.send_wake = Waker(settings)
        yield service
        for worker in service.workers:
            worker.kill()
        service.redis.close()
        service.send_wake.close()
