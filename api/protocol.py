"""HTTP/1.1 as uvicorn reads it, with a bound on what a stranger may send before he is asked for his key."""

import asyncio
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 * 2**10  # request line and headers; h11 and most proxies allow as much or less
HEAD_WITHIN_S = 30.0


class BoundedHead(HttpToolsProtocol):
    """Closes a connection whose next request head is too long or too slow; uvicorn itself bounds neither.

    Without it one connection fills the memory with headers, and a thousand that say nothing use up the descriptors.
    """

    _head_due: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Expect a head."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head alone: all that was read since it began, while it has not ended."""
        head = self._head_due
        super().data_received(data)
        if head is None or head is not self._head_due:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The request line and headers are too long.")

    def on_message_begin(self) -> None:
        """Expect the rest of the head, unless this is the connection's first and expected already."""
        if self._head_due is None:
            self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Take the head, which is as long as it may be."""
        self._head_is_there()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_due = self.loop.call_later(HEAD_WITHIN_S, self.transport.close)

    def _head_is_there(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
