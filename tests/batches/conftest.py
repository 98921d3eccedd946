"""A served API, a feeder beside it, and the stock client."""

import asyncio
import contextlib
import json

import openai
import pytest
from sabotage import pytest_configure, pytest_generate_tests, sabotage
from service import app, client, service, serving, stats, take_turns, worker

from d3serve.api.batch_feeder import Feeder
from d3serve.settings import Settings
from d3serve.store.batches import BatchStore
from d3serve.store.jobs import JobStore

__all__ = [
    "app", "client", "pytest_configure", "pytest_generate_tests", "sabotage", "service", "serving", "stats",
    "take_turns", "worker",
]  # fmt: skip

PREFIX = "d3:{default}:"
WITHIN_S = 50  # who ends a test from outside, as pytest-timeout does, leaves its coroutine running, and hangs after it
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def settings(redis_url, raw_redis, sabotage):  # noqa: ARG001 - emptied first; a script is broken before it is used
    return Settings(redis_url=redis_url)


@pytest.fixture
def decisions():
    """Lines of a batch for /v1/decisions."""

    def make(count, start=0, **changes):
        asked = [{"type": "predicate", "name": "net", "instructions": "The package needs a network."}]
        return [
            {
                "custom_id": f"line-{number}", "method": "POST", "url": "/v1/decisions",
                "body": {"model": "jev-latest", "input": f"state {number}", "questions": asked},
            } | changes
            for number in range(start, start + count)
        ]  # fmt: skip

    return make


def jsonl(lines):
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Batches:
    """The stock client, and what a test asks of it again and again."""

    def __init__(self, address):
        self.client = openai.AsyncOpenAI(api_key="any", base_url=f"{address}/v1", max_retries=0)

    async def upload(self, lines, **more):
        data = lines if isinstance(lines, bytes) else jsonl(lines)
        return await self.client.files.create(file=("requests.jsonl", data), purpose="batch", **more)

    async def start(self, lines, endpoint="/v1/decisions", **more):
        file = await self.upload(lines)
        return await self.client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
        )

    async def until(self, batch, *statuses, work=lambda: asyncio.sleep(0.02)):
        """The batch once it has ended, or has one of these statuses; `work` is done until then."""
        async with asyncio.timeout(WITHIN_S):
            while (found := await self.client.batches.retrieve(batch.id)).status not in (statuses or ENDED):
                await work()
        return found

    async def rows(self, file_id):
        if file_id is None:
            return []
        content = await self.client.files.content(file_id)
        return [json.loads(line) for line in content.content.splitlines()]

    async def outcomes(self, batch):
        """The custom_ids in both files of a batch."""
        files = (batch.output_file_id, batch.error_file_id)
        return sorted([row["custom_id"] for file in files for row in await self.rows(file)])


@pytest.fixture
async def batches(service, worker):  # noqa: ARG001 - a model is served
    asked = Batches(service)
    yield asked
    await asked.client.close()


@pytest.fixture
async def make_feeder(settings):
    """A feeder that does a step when it is told to."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**changes):
            chosen = settings.model_copy(update=changes)
            jobs = await stack.enter_async_context(JobStore.open(chosen))
            table = await stack.enter_async_context(contextlib.aclosing(BatchStore.open(chosen)))
            return Feeder(table, jobs, chosen, lambda _lane: None)

        yield make


@pytest.fixture
def feeding(make_feeder):
    """A feeder that works for as long as the block lasts."""

    @contextlib.asynccontextmanager
    async def run(**changes):
        stop = asyncio.Event()
        task = asyncio.create_task((await make_feeder(**changes)).run(stop))
        try:
            yield
        finally:
            stop.set()
            await task

    return run


@pytest.fixture
def let_claims_run_out(raw_redis):
    """What a killed feeder had claimed is due."""

    def run_out(tenant="public"):
        for batch in raw_redis.zrange(f"{PREFIX}feed:{tenant}", 0, -1):
            raw_redis.zadd(f"{PREFIX}feed:{tenant}", {batch: 0})
        raw_redis.zadd(f"{PREFIX}feeds", {tenant: 0})

    return run_out


@pytest.fixture
async def table(settings):
    """The table as a feeder has it."""
    async with contextlib.aclosing(BatchStore.open(settings)) as opened:
        yield opened
