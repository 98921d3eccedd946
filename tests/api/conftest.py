"""The API on a real Redis-protocol server, called in process; a hand-driven worker stands in for the model."""

import json

import httpx
import pytest
import redis

from d3serve.api.app import create_app
from d3serve.broker import EmbeddedBroker
from d3serve.schemas import DecisionResponse, JobError, ModelInfo, NoulAnswer, Usage
from d3serve.settings import Settings
from d3serve.store.turns import TurnStore

MODEL = ModelInfo(
    name="vllm-sr/d3-tiny",
    revision="abc123",
    attention_mode="prefix_bidir",
    prompt_layout="state-first",
    validated_length=32_768,
    max_length=131_072,
    dtype="float32",
    device="cpu",
)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory):
    broker = EmbeddedBroker(tmp_path_factory.mktemp("redis"), 2**28).start()
    yield broker.url
    broker.stop()


@pytest.fixture
def raw_redis(redis_url):
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def settings(redis_url, raw_redis):  # noqa: ARG001 - the server is emptied first
    return Settings(redis_url=redis_url, lease_s=5)


class HandWorker:
    """Takes turns when told to, and answers every question with the same probability."""

    def __init__(self, settings):
        self.turns = TurnStore.open(settings, "hand:1")

    def show_itself(self, load="loaded"):
        self.turns.publish({"load": load, "model": MODEL.model_dump_json(), "pid": 1, "host": "here",
                            "lanes": "interactive,offline", "tokens_per_s": 1000})  # fmt: skip

    def claim(self):
        return self.turns.claim(1)

    def finish(self, turn, **changes):
        for job in turn.jobs:
            answers = {name: NoulAnswer(noul=0.75) for name in json.loads(job.questions)}
            usage = Usage(
                input_tokens=20,
                computed_tokens=20,
                state_tokens=9,
                state_cached=False,
                questions=len(answers),
            )
            response = DecisionResponse(
                model="vllm-sr/d3-tiny@abc123", answers=answers | changes, usage=usage
            )
            assert self.turns.succeed(turn.lease, job.id, response)
        self.turns.free(turn.lease, "back")

    def fail(self, turn, code, message):
        for job in turn.jobs:
            assert self.turns.fail(turn.lease, job.id, JobError(code=code, message=message))
        self.turns.free(turn.lease, "back")

    def work(self):
        """One turn: claim what waits, answer it; returns what was claimed."""
        turn = self.claim()
        self.finish(turn)
        return turn.jobs


@pytest.fixture
def worker(settings):
    hand = HandWorker(settings)
    hand.show_itself()
    yield hand
    hand.turns.close()


@pytest.fixture
async def app(settings):
    application = create_app(settings)
    async with application.router.lifespan_context(application):
        yield application


@pytest.fixture
async def client(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://d3serve.test", timeout=30) as http:
        yield http


@pytest.fixture
def stats(app):
    return app.state.parts.store.stats
