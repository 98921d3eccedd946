"""Kombu's Redis transport, made to work while Redis is full, and not to fall over what stands in a queue.

A full queue must still be able to empty, so wake-ups must still arrive. Redis refuses plain writes then, but not
those of a script whose first write takes no memory; what a binding and a wake-up need is a few hundred bytes.
"""

from queue import Empty
from typing import Any, Final

import structlog
from kombu.connection import Connection
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import redis as kombu_redis
from kombu.utils.json import dumps
from redis.exceptions import ResponseError

from d3serve.settings.redis_url import RedisURL
from d3serve.store.connect import connection_class, is_full

WRITE: Final = "redis.call('DEL', KEYS[1] .. ':none') return redis.call(ARGV[1], KEYS[1], ARGV[2])"
SERVER: Final = "server_url"  # our transport option: the URL, which kombu would read in a way of its own
TCP_ONLY: Final = ("host", "port", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options")
UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError)

log = structlog.get_logger(__name__)


class _NothingToSettle(kombu_redis.QoS):
    """Wake-ups are not acknowledged, so none is ever kept to be restored; kombu would write, and lock, all the same.

    Its write is a transaction, which a full Redis 7.0 refuses, and it remembers each message's name for good.
    """

    def ack(self, *_: Any, **__: Any) -> None:
        pass

    def reject(self, *_: Any, **__: Any) -> None:
        pass

    def restore_visible(self, *_: Any, **__: Any) -> None:
        pass


class _Wakes:
    """Mixed into a channel: connects as the job table does, writes where Redis is full, drops what it cannot read."""

    QoS = _NothingToSettle
    from_transport_options: Any = (*kombu_redis.Channel.from_transport_options, SERVER)
    server_url = ""

    def _connparams(self: Any, asynchronous: bool = False) -> dict[str, Any]:
        """Kombu's parameters of a connection, with the place and the login that we have read from the URL."""
        server = RedisURL.parse(self.server_url)
        self.connection_class = connection_class(server.scheme)
        params = {**super()._connparams(asynchronous), **server.login}  # type: ignore[misc] # a mixin
        if server.master is None:
            if server.path is not None:
                params = {name: value for name, value in params.items() if name not in TCP_ONLY}
            params |= server.place
        return params

    def _brpop_read(self: Any, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[misc] # a mixin
        except UNREADABLE as error:  # of kombu or Celery, about what somebody else has written there
            log.warning("wake.unreadable", error=type(error).__name__)
            raise Empty from None

    def _put(self: Any, queue: str, message: dict[str, Any], **options: Any) -> None:
        try:
            super()._put(queue, message, **options)  # type: ignore[misc] # a mixin
        except ResponseError as error:
            key = self._q_for_pri(queue, self._get_message_priority(message, reverse=False))
            self._write_in_a_script(error, "LPUSH", key, dumps(message))  # type: ignore[no-untyped-call] # as above

    def _queue_bind(self: Any, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        try:
            super()._queue_bind(exchange, routing_key, pattern, queue)  # type: ignore[misc] # a mixin
        except ResponseError as error:
            member = self.sep.join([routing_key or "", pattern or "", queue or ""])
            self._write_in_a_script(error, "SADD", self.keyprefix_queue % (exchange,), member)

    def _write_in_a_script(self: Any, error: ResponseError, command: str, key: str, value: str) -> None:
        if not is_full(error):
            raise error
        with self.conn_or_acquire() as client:
            client.eval(WRITE, 1, self.global_keyprefix + key, command, value)


class _Channel(_Wakes, kombu_redis.Channel):
    pass


class _SentinelChannel(_Wakes, kombu_redis.SentinelChannel):
    from_transport_options: Any = (*kombu_redis.SentinelChannel.from_transport_options, SERVER)


class Transport(kombu_redis.Transport):
    """What `redis://` means to kombu in our processes."""

    Channel = _Channel


class SentinelTransport(kombu_redis.SentinelTransport):
    """What `sentinel://` means."""

    Channel = _SentinelChannel


class PromptConnection(Connection):
    """A connection that is tried again every other second; kombu would wait longer each time, up to half a minute."""

    def _ensure_connection(self, *args: Any, **options: Any) -> Any:
        return super()._ensure_connection(*args, **{"interval_step": 0, **options})  # type: ignore[no-untyped-call]


def install() -> None:
    """Let kombu take these for its own: it finds a transport by the URL's scheme alone, also when it fails over."""
    TRANSPORT_ALIASES["redis"] = f"{__name__}:{Transport.__name__}"
    TRANSPORT_ALIASES["sentinel"] = f"{__name__}:{SentinelTransport.__name__}"
