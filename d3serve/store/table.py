"""The job table itself: a client, the keys of a namespace, the scripts on them. Every store stands on one.

What goes through `run`, `send` and `pipeline` raises StorageUnavailable where Redis is away, full or not ready for us.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self, get_args

from d3serve.settings import Settings
from d3serve.store import lua
from d3serve.store.connect import AsyncRedisClient, RedisClient, close_async, open_async, storage_errors
from d3serve.store.keys import Keys

Argument = str | int | float | bytes


class _Table:
    """What both halves have; `client` is for what maps its errors itself."""

    def __init__(self, client: Any, namespace: str) -> None:
        self.client = client
        self.key = Keys(namespace)
        # redis-py's: known by their digest, and sent again to a server that has forgotten them.
        self._scripts = {name: client.register_script(lua.script(name)) for name in get_args(lua.ScriptName)}


class Table(_Table):
    """The table as workers and operators use it."""

    client: RedisClient

    def run(self, name: lua.ScriptName, *args: Argument) -> Any:
        """Run a script: one step, wholly done or not at all."""
        with storage_errors():
            return self._scripts[name]((self.key.prefix,), args)

    def run_each(self, name: lua.ScriptName, calls: Sequence[Sequence[Argument]]) -> list[Any]:
        """Run a script with each of these arguments; the runs travel together, and others may come between them."""
        if len(calls) == 1:  # a pipeline asks first whether the server knows the script
            return [self.run(name, *calls[0])]
        with self.pipeline() as pipe:
            for args in calls:
                self._scripts[name]((self.key.prefix,), args, pipe)
            return list(pipe.execute())

    def send(self, command: str, *args: Argument, **options: Any) -> Any:
        """Send one command, by redis-py's name for it."""
        with storage_errors():
            return getattr(self.client, command)(*args, **options)

    @contextmanager
    def pipeline(self, *, transaction: bool = False) -> Iterator[Any]:
        """Commands that travel together; others may come between them, unless it is a transaction."""
        with storage_errors(), self.client.pipeline(transaction=transaction) as pipe:
            yield pipe

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


class AsyncTable(_Table):
    """The same for asyncio, as the API and the webhook sender use it."""

    client: AsyncRedisClient

    async def run(self, name: lua.ScriptName, *args: Argument) -> Any:
        """Run a script: one step, wholly done or not at all."""
        with storage_errors():
            return await self._scripts[name]((self.key.prefix,), args)

    async def run_each(self, name: lua.ScriptName, calls: Sequence[Sequence[Argument]]) -> list[Any]:
        """Run a script with each of these arguments; the runs travel together, and others may come between them."""
        async with self.pipeline() as pipe:
            for args in calls:
                await self._scripts[name]((self.key.prefix,), args, pipe)
            return list(await pipe.execute())

    async def send(self, command: str, *args: Argument, **options: Any) -> Any:
        """Send one command, by redis-py's name for it."""
        with storage_errors():
            return await getattr(self.client, command)(*args, **options)

    @asynccontextmanager
    async def pipeline(self, *, transaction: bool = False) -> AsyncIterator[Any]:
        """Commands that travel together; others may come between them, unless it is a transaction."""
        with storage_errors():
            async with self.client.pipeline(transaction=transaction) as pipe:
                yield pipe

    async def now_us(self) -> int:
        """Redis' clock, in microseconds since the epoch: the one clock that all processes share."""
        seconds, micros = await self.send("time")
        return int(seconds) * 1_000_000 + int(micros)

    async def close(self) -> None:
        """Close the connections."""
        await close_async(self.client)


class AsyncStore:
    """What a store for asyncio begins with: the table on `settings.redis_url`, its keys and its clock."""

    def __init__(self, client: AsyncRedisClient, settings: Settings) -> None:
        self._table = AsyncTable(client, settings.namespace)
        self._key = self._table.key

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Make a store on `settings.redis_url`; it connects on first use."""
        return cls(open_async(settings), settings)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._table.close()

    async def now_s(self) -> float:
        """Redis' clock."""
        return await self._table.now_us() / 1e6
