"""The connections of an API process: bounded, taken in turns, none lost, sent what redis-py would send."""

import asyncio

import pytest
import redis.asyncio

from d3serve.errors import StorageUnavailable
from d3serve.settings import Settings
from d3serve.store import connect
from d3serve.store.connect import close_async, connection_class, open_async
from d3serve.store.memory import MemoryGuard
from d3serve.store.table import AsyncTable

pytestmark = pytest.mark.anyio
DEADLINE_S = 10


@pytest.fixture
async def client(broker_urls, monkeypatch):
    monkeypatch.setattr(connect, "ASYNC_CONNECTIONS", 2)
    client = open_async(Settings(redis_url=broker_urls("valkey")))
    yield client
    await close_async(client)


async def busy(pool):
    return [await pool.get_connection() for _ in range(connect.ASYNC_CONNECTIONS)]


async def serves(client):
    """Whether every connection can still be had, and all at once."""
    async with asyncio.timeout(DEADLINE_S):
        for one in await busy(client.connection_pool):
            await client.connection_pool.release(one)
        return await client.ping()


async def test_more_commands_than_connections_take_turns(client):
    async with asyncio.timeout(DEADLINE_S):
        answers = await asyncio.gather(*(client.incr("turns") for _ in range(50)))
    assert len(set(answers)) == 50
    assert len(client.connection_pool._available_connections) == 2


async def test_who_waited_longest_is_served_first(client):
    pool, order = client.connection_pool, []
    taken = await busy(pool)

    async def wait(name):
        one = await pool.get_connection()
        order.append(name)
        await pool.release(one)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        for name in range(5):
            tasks.create_task(wait(name))
            await asyncio.sleep(0)
        for one in taken:
            await pool.release(one)
        tasks.create_task(wait("late"))
    assert order == [0, 1, 2, 3, 4, "late"]


async def test_nobody_waits_for_ever(client, monkeypatch):
    monkeypatch.setattr(connect, "TURN_WITHIN_S", 0.05)
    taken = await busy(client.connection_pool)
    with pytest.raises(redis.ConnectionError, match="no connection came free"):
        async with asyncio.timeout(DEADLINE_S):
            await client.ping()
    for one in taken:
        await client.connection_pool.release(one)
    assert await serves(client)


async def test_a_turn_that_is_given_up_is_not_lost(client):
    taken = await busy(client.connection_pool)
    waiting = [asyncio.create_task(client.ping()) for _ in range(4)]
    await asyncio.sleep(0)
    for task in waiting[:2]:
        task.cancel()
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    waiting[2].cancel()  # in the moment in which it is given a connection
    for one in taken:
        await client.connection_pool.release(one)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await serves(client)


async def test_a_connection_that_cannot_be_made_is_not_lost(client, monkeypatch):
    async def refuse(*_):
        raise redis.ConnectionError("away")

    with monkeypatch.context() as away:
        away.setattr(redis.asyncio.ConnectionPool, "ensure_connection", refuse)
        for _ in range(5):
            with pytest.raises(redis.ConnectionError):
                await client.ping()
    assert await serves(client)


@pytest.mark.parametrize(
    "command",
    [
        ("SET", "name", "é\n\x00", "PX", 5),
        ("EVALSHA", "0" * 40, 1, "key", b"\xff\x00", 1.5, -7, "", 2**63),
        ("SET", "state", b"x" * (connect.COPIED_BYTES + 1)),
        ("SET", "state", memoryview(b"part"), bytearray(b"other")),
        ("SCRIPT LOAD", "return 1"),
        (b"PING",),
    ],
    ids=lambda command: str(command[0]),
)
async def test_a_command_is_sent_as_redis_py_sends_it(command):
    ours = connection_class("redis", asynchronous=True)(decode_responses=True)
    theirs = redis.asyncio.Connection(decode_responses=True)
    assert b"".join(ours.pack_command(*command)) == b"".join(theirs.pack_command(*command))


@pytest.mark.parametrize("argument", [None, True, object(), ["list"]])
async def test_what_is_no_argument_is_refused_as_before(argument):
    with pytest.raises(redis.DataError):
        connection_class("redis", asynchronous=True)().pack_command("SET", "name", argument)


async def test_one_of_many_asks_how_full_redis_is(client, monkeypatch):
    asked = 0

    async def info(_):
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if asked == 1:
            raise redis.ConnectionError("away")
        return {"maxmemory": 100, "used_memory": 95}

    monkeypatch.setattr(client, "info", info)
    guard = MemoryGuard(AsyncTable(client, "pool"))
    with pytest.raises(StorageUnavailable, match="cannot be used"):
        await guard.admit()
    for _ in range(2):  # a failure is no answer, and an answer is believed
        with pytest.raises(StorageUnavailable, match="95% full"):
            await guard.admit()
    assert asked == 2
    guard._until = 0.0
    told = await asyncio.gather(*(guard.admit() for _ in range(20)), return_exceptions=True)
    assert asked == 3
    assert all(isinstance(one, StorageUnavailable) for one in told)
