"""Connections to Redis: how long they wait, how often they retry, and what its errors mean to us."""

import asyncio
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import (
    ClusterDownError,
    ExecAbortError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from d3serve.errors import BrokerUnavailable, StorageUnavailable
from d3serve.settings import Settings
from d3serve.settings.redis_url import RedisURL

# redis-py types every reply for text and bytes at once. Ours are text, so a client is Any beyond this file.
RedisClient = Any
AsyncRedisClient = Any

# A thousand clients may wait at once; they take turns on so many connections.
ASYNC_CONNECTIONS = 32
TURN_WITHIN_S = 20.0

# A half-open connection (the peer is gone, nobody said so) is noticed within socket_timeout.
COMMON: dict[str, Any] = {
    "decode_responses": True,
    "health_check_interval": 5,
    "socket_connect_timeout": 2,
}
LOST = (RedisConnectionError, RedisTimeoutError)
IN_C: Final[Any] = HiredisRespSerializer()
COPIED_BYTES: Final = 2**16  # a longer argument is sent from where it stands

# What a server says that is there, but cannot do now what it could before and may again: its disk is full, it lost
# its replicas or its master, it was demoted, it loads, a script runs. redis-py has classes for some of these replies;
# the others are known by their first word, which an old server puts behind a script's place.
NOT_NOW: Final = (ReadOnlyError, ClusterDownError, TryAgainError)
CANCEL_AGAIN_S: Final = 0.1
LEAST_REDIS: Final = 7  # the oldest major version that tests have run on
UNKNOWN_HELLO: Final = re.compile("unknown command.*HELLO", re.IGNORECASE)
NOT_NOW_WORDS: Final = re.compile(
    r"(?:^|: -)"
    r"(?P<word>MISCONF|NOREPLICAS|UNBLOCKED|BUSY|LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN) "
)
REFUSED: Final = (ExecAbortError, NoPermissionError)  # of what we do, nothing is, while all is well


class NotNow(RedisConnectionError):
    """A server that cannot serve now, to be waited for like one that is away; its first word says why."""


def _raise_not_now(error: ResponseError) -> None:
    if isinstance(error, NOT_NOW):
        raise NotNow(f"{type(error).__name__} {error}") from error
    if found := NOT_NOW_WORDS.search(str(error)):
        raise NotNow(str(error)[found.start("word") :]) from error


class _Patient:
    """Mixed into a connection: a server that cannot serve now counts as away, as redis-py has it of one that loads."""

    def read_response(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc] # a mixin
        except ResponseError as error:
            _raise_not_now(error)
            raise


class _PatientAsync:
    """The same for an asyncio connection, which also packs commands as redis-py's others do: in C."""

    def pack_command(self: Any, *args: Any) -> list[bytes]:
        """The command as it is sent. In Python, as redis-py does it for asyncio, SUBMIT's takes 30 µs, not 9."""
        long = [one for one in args if type(one) is bytes and len(one) > COPIED_BYTES]
        pack = super().pack_command if long else IN_C.pack  # type: ignore[misc] # a mixin
        packed: list[bytes] = pack(*args)
        return packed

    async def read_response(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc] # a mixin
        except ResponseError as error:
            _raise_not_now(error)
            raise


class _Pool(redis.asyncio.ConnectionPool):
    """A pool whose callers take turns on its connections, and none waits while one is idle.

    That of redis-py that waits takes two locks and sets a timer for each command.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(max_connections=ASYNC_CONNECTIONS, **options)
        self._turns = asyncio.Semaphore(ASYNC_CONNECTIONS)

    async def get_connection(self, *_: Any, **__: Any) -> Any:
        """A connection that is ready to send.

        Raises:
            ConnectionError: none came free in time, or the server is away.
        """
        if self._turns.locked():
            try:
                async with asyncio.timeout(TURN_WITHIN_S):
                    await self._turns.acquire()
            except TimeoutError:
                raise RedisConnectionError("no connection came free") from None
        else:
            await self._turns.acquire()
        try:
            connection = self.get_available_connection()  # type: ignore[no-untyped-call]
        except BaseException:
            self._turns.release()
            raise
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        """Take back what `get_connection` gave."""
        try:
            await super().release(connection)
        finally:
            self._turns.release()


@cache
def connection_class(scheme: str, *, asynchronous: bool = False) -> Any:
    """The class of connections to a server whose URL has this scheme."""
    room: Any = redis.asyncio if asynchronous else redis
    kinds = {
        "redis": room.Connection,
        "rediss": room.SSLConnection,
        "unix": room.UnixDomainSocketConnection,
        "sentinel": room.sentinel.SentinelManagedConnection,
    }
    kind = kinds[scheme]
    # redis-py counts failed health checks by host and port, and falls over a connection that has none.
    named = {"host": "unix", "port": 0} if scheme == "unix" else {}
    return type(kind.__name__, (_PatientAsync if asynchronous else _Patient, kind), named)


def server_of(settings: Settings) -> RedisURL:
    """Where the server is.

    Raises:
        BrokerUnavailable: no URL is set.
    """
    if settings.redis_url is None:
        raise BrokerUnavailable("no Redis-protocol server: set D3SERVE_REDIS_URL or use `d3serve up`")
    return RedisURL.parse(settings.redis_url)


def open_async(settings: Settings) -> AsyncRedisClient:
    """An asyncio client for the API: gives up within seconds, since an HTTP client waits."""
    server = server_of(settings)
    retry = AsyncRetry(ExponentialBackoff(cap=0.5, base=0.05), 4)
    options = {**COMMON, **server.login, "socket_timeout": 5, "retry": retry, "retry_on_error": list(LOST)}
    options["connection_class"] = connection_class(server.scheme, asynchronous=True)
    if server.master is not None:
        watch: Any = redis.asyncio.sentinel.Sentinel
        sentinel = watch(list(server.hosts), socket_timeout=1)
        return sentinel.master_for(server.master, max_connections=1024, **options)
    return redis.asyncio.Redis.from_pool(_Pool(**server.place, **options))


async def close_async(client: AsyncRedisClient) -> None:
    """Close a client of `open_async`, and what it asked sentinels with, which redis-py leaves open."""
    await client.aclose()
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    for sentinel in manager.sentinels if manager else ():
        await sentinel.aclose()


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended: redis-py swallows a cancellation that meets it while it connects."""
    going = {task for task in tasks if not task.done()}
    while going:
        for task in going:
            task.cancel()
        going = (await asyncio.wait(going, timeout=CANCEL_AGAIN_S))[1]


def tries_in(patience_s: float) -> int:
    """How many retries fill this time: five take the first second, then one a second."""
    return 5 + round(patience_s) if patience_s else 0


def open_sync(settings: Settings, *, patience_s: float = 20, answer_s: float = 5) -> RedisClient:
    """A client for workers: outlasts a restart of Redis, so that a finished turn is not thrown away.

    It waits `answer_s` for each answer, and tries again for `patience_s`.
    """
    server = server_of(settings)
    retry = Retry(ExponentialBackoff(cap=1, base=0.05), tries_in(patience_s))
    options = {
        **COMMON,
        **server.login,
        "socket_timeout": answer_s,
        "retry": retry,
        "retry_on_error": list(LOST),
    }
    options["socket_connect_timeout"] = min(answer_s, COMMON["socket_connect_timeout"])
    options["connection_class"] = connection_class(server.scheme)
    if server.master is not None:
        watch: Any = redis.sentinel.Sentinel
        return watch(list(server.hosts), socket_timeout=1).master_for(server.master, **options)
    return redis.Redis.from_pool(redis.ConnectionPool(**server.place, **options))


def is_full(error: ResponseError) -> bool:
    """Whether Redis has refused a write for want of memory; a script's error may be wrapped."""
    return isinstance(error, OutOfMemoryError) or "OOM" in str(error)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn what Redis says when it is away, full or not ready for us into StorageUnavailable; let bugs through."""
    try:
        yield
    except LOST as error:
        about = str(error).partition(" ")[0] if isinstance(error, NotNow) else type(error).__name__
        raise StorageUnavailable(f"the job table cannot be used: {about}") from error
    except REFUSED as error:
        raise StorageUnavailable(f"the job table cannot be used: {type(error).__name__}") from error
    except ResponseError as error:
        if is_full(error):
            raise StorageUnavailable("the job table is full") from error
        raise


def check_server(settings: Settings, *, patience_s: float = 2, may_be_away: bool = False) -> str:
    """Name and version of the server, if it may hold a job table; `may_be_away` is for who waits for it later.

    Raises:
        BrokerUnavailable: it does not answer, is too old, or may evict keys (an evicted key is a lost job).
    """
    client, where = open_sync(settings, patience_s=patience_s), server_of(settings)
    try:
        about, policy = client.info("server"), client.info("memory").get("maxmemory_policy", "noeviction")
    except RedisError as error:
        if UNKNOWN_HELLO.search(str(error)):  # the first command of every connection, new in Redis 6
            raise _too_old("Redis", where) from error
        if may_be_away:
            return f"nobody yet at {where}"
        raise BrokerUnavailable(f"Redis does not answer at {where}: {error}") from error
    finally:
        client.close()
    if about.get("server_name") == "valkey":  # it also gives the version of the Redis that it stands for
        name = f"Valkey {about.get('valkey_version')}"
    else:
        name = f"Redis {about.get('redis_version')}"
        if int(str(about.get("redis_version", 0)).partition(".")[0]) < LEAST_REDIS:
            raise _too_old(name, where)
    if policy != "noeviction":
        raise BrokerUnavailable(
            f"{name} at {where} has maxmemory-policy {policy}: it would evict waiting jobs. "
            "Set maxmemory-policy noeviction."
        )
    return f"{name} at {where}"


def _too_old(name: str, where: RedisURL) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"{name} at {where} is too old: d3serve needs Redis {LEAST_REDIS}.0 or newer, or Valkey"
    )
