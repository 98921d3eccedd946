"""The table below every store: a server that forgets, goes away, is full or is asked for nonsense."""

import inspect

import pytest
from redis.exceptions import ResponseError

from d3serve.errors import StorageUnavailable
from d3serve.settings import Settings
from d3serve.store.connect import open_async, open_sync
from d3serve.store.table import AsyncTable, Table
from d3serve.up.broker import EmbeddedBroker

pytestmark = pytest.mark.anyio


class Half:
    """One half of the table on a server of its own; what it is asked for is awaited where it must be."""

    def __init__(self, name, broker):
        settings = Settings(redis_url=broker.url)
        self.broker = broker
        if name == "sync":
            self.table = Table(open_sync(settings, patience_s=0), settings.namespace)
        else:
            self.table = AsyncTable(open_async(settings), settings.namespace)

    async def run(self, *args):
        return await settled(self.table.run(*args))

    async def send(self, *args):
        return await settled(self.table.send(*args))

    async def together(self, *commands):
        if isinstance(self.table, Table):
            with self.table.pipeline() as pipe:
                for command, *args in commands:
                    getattr(pipe, command)(*args)
                return pipe.execute()
        async with self.table.pipeline() as pipe:
            for command, *args in commands:
                getattr(pipe, command)(*args)
            return await pipe.execute()


async def settled(answer):
    return await answer if inspect.isawaitable(answer) else answer


@pytest.fixture(params=["sync", "async"])
async def half(request, tmp_path):
    broker = EmbeddedBroker(tmp_path, 2**24).start()
    half = Half(request.param, broker)
    yield half
    await settled(half.table.close())
    broker.stop()


async def test_a_script_is_told_again_to_a_server_that_has_forgotten_it(half):
    assert await half.run("rate", "key", 60_000) == [1, 60_000]
    await half.send("script_flush")
    count, _ = await half.run("rate", "key", 60_000)
    assert count == 2


async def test_a_script_is_told_to_a_server_that_took_the_place_of_the_one_that_knew_it(half):
    assert (await half.run("rate", "key", 600_000))[0] == 1
    half.broker.stop()
    half.broker.start()
    count, _ = await half.run("rate", "key", 600_000)
    assert count == 2
    assert (await half.run("rate", "key", 600_000))[0] == 3


async def test_a_server_that_is_away_is_a_storage_that_is_unavailable(half):
    half.broker.stop()
    for asked in (half.run("rate", "key", 1), half.send("get", "key"), half.together(("get", "key"))):
        with pytest.raises(StorageUnavailable, match="cannot be used: ConnectionError"):
            await asked


async def test_a_full_server_is_a_storage_that_is_unavailable(half):
    await half.send("config_set", "maxmemory", 1)
    for asked in (
        half.run("hook_open", "msg", "me", "{}", "event", "job.failed"),
        half.send("set", "key", "x"),
        half.together(("set", "key", "x")),
    ):
        with pytest.raises(StorageUnavailable, match="the job table is full"):
            await asked


async def test_a_bug_is_none_of_it(half):
    await half.send("set", "text", "x")
    for asked in (
        half.run("rate", "key"),
        half.send("hget", "text", "f"),
        half.together(("hget", "text", "f")),
    ):
        with pytest.raises(ResponseError):
            await asked
