"""One job table on three servers: fakeredis, the embedded Valkey and, where installed, Debian's Redis."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import fakeredis
import pytest
import redis
import redis.asyncio
from sabotage import pytest_configure, pytest_generate_tests, sabotage

from d3serve.schemas import DecisionRequest, DecisionResponse, JobOptions, Usage
from d3serve.schemas.questions import ChoiceQuestion, NoulAnswer, NoulQuestion
from d3serve.settings import Settings
from d3serve.store.jobs import JobStore
from d3serve.store.keys import Keys
from d3serve.store.turns import TurnStore
from d3serve.up.broker import EmbeddedBroker, find_server

__all__ = ["pytest_configure", "pytest_generate_tests", "sabotage"]

DEBIAN = shutil.which("redis-server")
SERVERS = ["fakeredis", "valkey", *(["redis"] if DEBIAN else [])]
MODEL = "vllm-sr/d3-tiny"


@pytest.fixture(scope="session")
def broker_urls(tmp_path_factory):
    brokers = {}

    def url(kind):
        if kind not in brokers:
            binary = Path(DEBIAN) if kind == "redis" else find_server()
            brokers[kind] = EmbeddedBroker(tmp_path_factory.mktemp(kind), 2**28, binary).start()
        return brokers[kind].url

    yield url
    for broker in brokers.values():
        broker.stop()


@dataclass
class Table:
    """The job table of one test: its async half, any number of workers, and Redis below them."""

    settings: Settings
    jobs: JobStore
    redis: redis.Redis

    def worker(self, name="worker-1", **changes):
        """A worker whose settings, or constants, are others."""
        settings = {field: changes.pop(field) for field in Settings.model_fields if field in changes}
        store = TurnStore(self.redis, self.settings.model_copy(update=settings), name)
        for constant, value in ({"lease_s": 5} | changes).items():
            assert hasattr(store, constant)
            setattr(store, constant, value)
        return store

    def key(self, *parts):
        return Keys(self.settings.namespace)(*parts)

    async def submit(self, state="the state", questions=("q",), *, tenant="me", **options):
        submitted = await self.jobs.submit(
            request(state, questions, **options), tenant=tenant, idempotency_key=None, fingerprint=""
        )
        return submitted.job_id


def request(state="the state", questions=("q",), **options):
    asked = {name: NoulQuestion(type="noul", instructions=f"is {name} so?") for name in questions}
    return DecisionRequest(model=MODEL, state=state, questions=asked, job=JobOptions(**options))


def response(questions=("q",), **usage):
    told = {"input_tokens": 9, "computed_tokens": 9, "state_tokens": 4, "state_cached": False} | usage
    answers = {name: NoulAnswer(noul=0.5) for name in questions}
    return DecisionResponse(model=MODEL, answers=answers, usage=Usage(questions=len(answers), **told))


@pytest.fixture
def make_request():
    return request


@pytest.fixture
def make_response():
    return response


@pytest.fixture
def choice():
    return ChoiceQuestion


@pytest.fixture(params=SERVERS)
async def table(request, broker_urls, sabotage):  # noqa: ARG001 # breaks the scripts before they are used
    settings = Settings(redis_url=None, max_queued_jobs=1000)
    if request.param == "fakeredis":
        server = fakeredis.FakeServer(version=(7,))
        sync = fakeredis.FakeRedis(server=server, decode_responses=True)
        client = fakeredis.FakeAsyncRedis(server=server, decode_responses=True)
    else:
        settings = settings.model_copy(update={"redis_url": broker_urls(request.param)})
        sync = redis.Redis.from_url(settings.redis_url, decode_responses=True)
        client = redis.asyncio.Redis.from_url(settings.redis_url, decode_responses=True)
        sync.flushall()
    async with JobStore(client, settings) as jobs:
        yield Table(settings, jobs, sync)
    sync.close()
