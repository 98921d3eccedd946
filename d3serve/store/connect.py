"""Connections to Redis: how long they wait, how often they retry, and what their errors mean to us.

A URL is `redis://`, `rediss://`, `unix://` or `sentinel://[:password@]host:port,host:port/master[/db]`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from d3serve.errors import BrokerUnavailable, StorageUnavailable
from d3serve.settings import Settings

# redis-py types every reply for text and bytes at once. Ours are text, so a client is Any beyond this file.
Client = Any
AsyncClient = Any

# A thousand clients may wait at once; they take turns on so many connections.
ASYNC_CONNECTIONS = 32

# A half-open connection (the peer is gone, nobody said so) is noticed within socket_timeout.
COMMON: dict[str, Any] = {
    "decode_responses": True,
    "health_check_interval": 5,
    "socket_connect_timeout": 2,
}
# A former master answers ReadOnly until the client has asked the sentinels again.
LOST = (RedisConnectionError, RedisTimeoutError, ReadOnlyError)


def require_url(settings: Settings) -> str:
    """The server's URL.

    Raises:
        BrokerUnavailable: none is set.
    """
    if settings.redis_url is None:
        raise BrokerUnavailable("no Redis-protocol server: set D3SERVE_REDIS_URL or use `d3serve up`")
    return settings.redis_url


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


@dataclass(frozen=True)
class SentinelURL:
    """Where the sentinels are, and which master they watch for us."""

    hosts: tuple[tuple[str, int], ...]
    master: str
    db: int
    password: str | None

    @classmethod
    def parse(cls, url: str) -> Self | None:
        """Read a `sentinel://` URL; None for any other.

        Raises:
            BrokerUnavailable: it names no host or no master.
        """
        if not url.startswith("sentinel://"):
            return None
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        master, _, db = parts.path.lstrip("/").partition("/")
        try:
            pairs = [host.rpartition(":") for host in hosts.split(",")]
            addresses = tuple((name, int(port)) for name, _, port in pairs)
            number = int(db or 0)
        except ValueError:
            addresses, number = (), 0
        if not master or not addresses or not all(name for name, _ in addresses):
            raise BrokerUnavailable(
                f"{without_password(url)}: expected sentinel://host:port,host:port/master"
            )
        return cls(addresses, master, number, login.partition(":")[2] or None)


def open_async(settings: Settings) -> AsyncClient:
    """An asyncio client for the API: gives up within seconds, since an HTTP client waits."""
    url = require_url(settings)
    retry = AsyncRetry(ExponentialBackoff(cap=0.5, base=0.05), 4)
    options = {**COMMON, "socket_timeout": 5, "retry": retry, "retry_on_error": list(LOST)}
    if sentinel := SentinelURL.parse(url):
        watch: Any = redis.asyncio.sentinel.Sentinel
        return watch(list(sentinel.hosts), socket_timeout=1).master_for(
            sentinel.master, db=sentinel.db, password=sentinel.password, max_connections=1024, **options
        )
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, max_connections=ASYNC_CONNECTIONS, timeout=20, **options
    )
    return redis.asyncio.Redis.from_pool(pool)


async def close_async(client: AsyncClient) -> None:
    """Close a client of `open_async`, and what it asked sentinels with, which redis-py leaves open."""
    await client.aclose()
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    for sentinel in manager.sentinels if manager else ():
        await sentinel.aclose()


def tries_in(patience_s: float) -> int:
    """How many retries fill this time: five take the first second, then one a second."""
    return 5 + round(patience_s) if patience_s else 0


def open_sync(settings: Settings, *, patience_s: float = 20) -> Client:
    """A client for workers: outlasts a restart of Redis, so that a finished turn is not thrown away."""
    url = require_url(settings)
    retry = Retry(ExponentialBackoff(cap=1, base=0.05), tries_in(patience_s))
    options = {**COMMON, "socket_timeout": 5, "retry": retry, "retry_on_error": list(LOST)}
    if sentinel := SentinelURL.parse(url):
        watch: Any = redis.sentinel.Sentinel
        return watch(list(sentinel.hosts), socket_timeout=1).master_for(
            sentinel.master, db=sentinel.db, password=sentinel.password, **options
        )
    return redis.Redis.from_url(url, **options)


def is_full(error: ResponseError) -> bool:
    """Whether Redis has refused a write for want of memory; a script's error may be wrapped."""
    return isinstance(error, OutOfMemoryError) or "OOM" in str(error)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn what Redis says when it is unreachable or full into StorageUnavailable; let bugs through."""
    try:
        yield
    except LOST as error:
        raise StorageUnavailable(f"the job table cannot be reached: {type(error).__name__}") from error
    except ResponseError as error:
        if is_full(error):
            raise StorageUnavailable("the job table is full") from error
        raise


def check_server(settings: Settings) -> None:
    """Return when the server may hold a job table.

    Raises:
        BrokerUnavailable: it does not answer, or may evict keys (an evicted key is a lost job).
    """
    client, where = open_sync(settings, patience_s=2), without_password(require_url(settings))
    try:
        policy = client.info("memory").get("maxmemory_policy", "noeviction")
    except RedisError as error:
        raise BrokerUnavailable(f"Redis does not answer at {where}: {error}") from error
    finally:
        client.close()
    if policy != "noeviction":
        raise BrokerUnavailable(
            f"Redis at {where} has maxmemory-policy {policy}: it would evict waiting jobs. "
            "Set maxmemory-policy noeviction."
        )
