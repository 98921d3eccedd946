"""What callers have under way in this process: bounded for each of them, and ended when a key goes."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from d3serve.api_keys import ApiKey, KeyRing
from d3serve.errors import D3ServeError, RateLimited, Unauthorized

# Of the connections that a process may have a quarter: `d3serve submit` alone waits for up to 1,000 jobs at once.
MAX_CALLS: Final = 1_024
MAX_STREAMS: Final = 100  # an event stream may stay for ever
CHECK_KEYS_EVERY_S: Final = 1.0


class Call:
    """One request, from the moment that its caller is known."""

    def __init__(self, key: ApiKey | None) -> None:
        self.key = key
        self._ended_by: D3ServeError | None = None
        self._task = asyncio.current_task()

    def end(self, error: D3ServeError) -> None:
        """Stop what it does; `error` is its answer, if it has given none. Asked again, stop it again.

        A cancellation may be lost: in redis-py while it connects, in `wait_for` of Python 3.11.
        """
        if self._task is not None:
            self._ended_by = error
            self._task.cancel()

    def close(self) -> D3ServeError | None:
        """What has ended it, if anything; its last words are not stopped in turn."""
        self._task = None
        return self._ended_by


class Calls:
    """The calls of one process by caller: an API key, or an address where no key is asked for."""

    def __init__(self) -> None:
        self._calls: dict[str, set[Call]] = defaultdict(set)
        self._streams: dict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def call(self, caller: str, key: ApiKey | None) -> Iterator[Call]:
        """A call that is under way for as long as the block lasts.

        Raises:
            RateLimited: the caller has as many as one may have.
        """
        mine = self._calls[caller]
        if len(mine) >= MAX_CALLS:
            raise RateLimited(f"this caller has {MAX_CALLS:,} requests under way; no more are taken at once")
        call = Call(key)
        mine.add(call)
        try:
            yield call
        finally:
            mine.discard(call)
            if not mine and self._calls.get(caller) is mine:
                del self._calls[caller]

    @contextlib.contextmanager
    def stream(self, caller: str) -> Iterator[None]:
        """An event stream that is open for as long as the block lasts.

        Raises:
            RateLimited: the caller has as many as one may have.
        """
        if self._streams[caller] >= MAX_STREAMS:
            raise RateLimited(f"this caller has {MAX_STREAMS} event streams open; no more are opened at once")
        self._streams[caller] += 1
        try:
            yield
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    async def watch(self, keys: KeyRing) -> None:
        """End the calls of keys that go, or change, for as long as the process runs."""
        while True:
            await asyncio.sleep(CHECK_KEYS_EVERY_S)
            keys.reread()
            for calls in list(self._calls.values()):
                for call in list(calls):
                    if call.key is not None and not keys.holds(call.key):
                        call.end(Unauthorized("the API key is not valid"))
