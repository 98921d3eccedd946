"""Connections to Redis: how long they wait, how often they retry, and what their errors mean to us."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio
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
LOST = (RedisConnectionError, RedisTimeoutError)


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


def open_async(settings: Settings) -> AsyncClient:
    """An asyncio client for the API: gives up within seconds, since an HTTP client waits."""
    retry = AsyncRetry(ExponentialBackoff(cap=0.5, base=0.05), 4)
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        require_url(settings), max_connections=ASYNC_CONNECTIONS, timeout=20, socket_timeout=5, retry=retry,
        retry_on_error=list(LOST), **COMMON,
    )  # fmt: skip
    return redis.asyncio.Redis.from_pool(pool)


def open_sync(settings: Settings, *, patience_s: float = 20) -> Client:
    """A client for workers: outlasts a restart of Redis, so that a finished turn is not thrown away."""
    retry = Retry(ExponentialBackoff(cap=1, base=0.05), round(patience_s) + 5)
    return redis.Redis.from_url(
        require_url(settings), socket_timeout=5, retry=retry, retry_on_error=list(LOST), **COMMON
    )


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn what Redis says when it is unreachable or full into StorageUnavailable; let bugs through."""
    try:
        yield
    except LOST as error:
        raise StorageUnavailable(f"the job table cannot be reached: {type(error).__name__}") from error
    except ReadOnlyError as error:
        raise StorageUnavailable(
            "the job table is read-only: a replica, or a failover is under way"
        ) from error
    except ResponseError as error:
        if isinstance(error, OutOfMemoryError) or "OOM" in str(error):  # a script's error may be wrapped
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
