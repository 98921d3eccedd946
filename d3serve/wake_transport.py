"""Kombu's Redis transport, made to work while Redis is full.

A full queue must still be able to empty, so wake-ups must still arrive. Redis refuses plain writes then, but not
those of a script whose first write takes no memory; what a binding and a wake-up need is a few hundred bytes.
"""

from typing import Any, Final

from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import redis as kombu_redis
from kombu.utils.json import dumps
from redis.exceptions import ResponseError

from d3serve.store.connect import is_full

WRITE: Final = "redis.call('DEL', KEYS[1] .. ':none') return redis.call(ARGV[1], KEYS[1], ARGV[2])"


class _NothingToRestore(kombu_redis.QoS):
    """Wake-ups are not acknowledged, so none is ever kept to be restored; kombu would take a lock to look."""

    def restore_visible(self, *_: Any, **__: Any) -> None:
        pass


class _WritesWhenFull:
    """Mixed into a channel: repeats in a script what Redis has refused for want of memory."""

    QoS = _NothingToRestore

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


class _Channel(_WritesWhenFull, kombu_redis.Channel):
    pass


class _SentinelChannel(_WritesWhenFull, kombu_redis.SentinelChannel):
    pass


class Transport(kombu_redis.Transport):
    """What `redis://`, `rediss://` and `redis+socket://` mean to kombu in our processes."""

    Channel = _Channel


class SentinelTransport(kombu_redis.SentinelTransport):
    """What `sentinel://` means."""

    Channel = _SentinelChannel


def install() -> None:
    """Let kombu take these for its own: it finds a transport by the URL's scheme alone, also when it fails over."""
    for scheme in ("redis", "rediss"):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{Transport.__name__}"
    TRANSPORT_ALIASES["sentinel"] = f"{__name__}:{SentinelTransport.__name__}"
