"""All connections of one API process: how many there may be, and the look at each, once a second."""

import asyncio
import resource
from collections.abc import Iterator
from typing import Final, Protocol

# Each may hold a head of 32 KiB and what reading it costs; four callers may have all that one may have.
MAX_CONNECTIONS: Final = 4_096
OTHER_DESCRIPTORS: Final = 128  # Redis, state files, logs, listeners
LOOK_EVERY_S: Final = 1.0


class Connection(Protocol):
    """What a connection must be for us."""

    def overdue(self, now_s: float) -> bool:
        """Whether the other side has used up its time in the phase that the connection is in."""

    def cut(self) -> None:
        """Close at once, whatever is unsent."""


def connections_allowed() -> int:
    """How many connections there may be with the file descriptors that the process has."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(16, min(MAX_CONNECTIONS, soft - OTHER_DESCRIPTORS))


class Connections:
    """Keeps count. A full process makes room by cutting the connection that has waited longest for a request.

    So strangers who open connections and send nothing, or send slowly, lock nobody out: a caller who has something to
    ask does so at once, and is no longer among those that wait. Nor is there a limit for each address, since behind
    a proxy all callers have one.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._all: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # for a request, or to be gone; the longest first
        self._look: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._all))

    def add(self, connection: Connection) -> bool:
        """Count in a connection, which waits for its first request; False if there is no room even so."""
        if len(self._all) >= self.most:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            self.remove(longest)
            longest.cut()
        self._all.add(connection)
        self.waits(connection)
        if self._look is None:
            self._look_later()
        return True

    def waits(self, connection: Connection) -> None:
        """Note that nothing is under way on the connection."""
        if connection in self._all:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def works(self, connection: Connection) -> None:
        """Note that a request is under way on the connection."""
        self._waiting.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        """Count out a connection."""
        self._all.discard(connection)
        self._waiting.pop(connection, None)

    def _look_later(self) -> None:
        self._look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_at_all)

    def _look_at_all(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for connection in self:
            if connection.overdue(now_s):
                connection.cut()
        self._look = None
        if self._all:
            self._look_later()
