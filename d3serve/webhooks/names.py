"""Looks names up, a few at a time for each tenant: a name server that never answers holds up its own tenant alone."""

import asyncio
import contextlib
import socket
import threading
import time
from collections import Counter
from typing import Final

TIMEOUT_S: Final = 5.0
PER_TENANT: Final = 4  # lookups at once
AT_ONCE: Final = 256  # of all tenants: each is a thread, which the C library may hold for half a minute
CROWDED_S: Final = 1.0
SLOW_S = 60.0  # for so long a name that timed out is not asked for again


class TryLater(Exception):
    """Nothing was tried; it may be in `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"not for {wait_s:.1f} s")
        self.wait_s = wait_s


class Names:
    """A resolver for one event loop; a lookup that its caller gave up still counts until its thread ends."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._slow: dict[tuple[str, str], float] = {}

    async def addresses(self, tenant: str, host: str, port: int) -> list[str]:
        """The addresses of a host, for one tenant.

        Raises:
            TryLater: the tenant has too many lookups under way, or this name did not answer within the last minute.
            TimeoutError: the name server does not answer.
            OSError: the name does not resolve.
        """
        now = time.monotonic()
        wait_s = self._slow.get((tenant, host), now) - now
        if self._running[tenant] >= PER_TENANT or self._running.total() >= AT_ONCE:
            wait_s = max(wait_s, CROWDED_S)
        if wait_s > 0:
            raise TryLater(wait_s)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._start(tenant, host, port)
        except TimeoutError:
            self._slow = {name: until for name, until in self._slow.items() if until > now}
            self._slow[tenant, host] = now + TIMEOUT_S + SLOW_S
            raise

    def _start(self, tenant: str, host: str, port: int) -> asyncio.Future[list[str]]:
        """Ask in a thread of its own: a stopping process waits for none of them, as it would for a pool's."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str]] = loop.create_future()
        self._running[tenant] += 1

        def end(found: list[str] | OSError) -> None:
            self._running[tenant] -= 1
            self._running += Counter()  # forgets who has none
            if answer.cancelled():
                return
            if isinstance(found, OSError):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def ask() -> None:
            found: list[str] | OSError
            try:
                rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found = list(dict.fromkeys(str(row[4][0]) for row in rows))
            except OSError as error:
                found = error
            except UnicodeError:
                found = OSError(f"{host} is no name")
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(end, found)

        threading.Thread(target=ask, name="lookup", daemon=True).start()
        return answer
