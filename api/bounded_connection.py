"""HTTP/1.1 as uvicorn reads it, with a bound on what a stranger may send, and a time for every phase of a connection.

A connection waits for a head, takes a body, gets an answer, or is being closed. In each phase but that in which we
work on an answer the other side has so much time, and in each it may send so many bytes. uvicorn bounds none of it.
"""

import asyncio
from typing import Any, Final

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from d3serve.api.bounds import MAX_UPLOAD_BYTES
from d3serve.api.connections import Connections
from d3serve.api.problems import problem_response
from d3serve.errors import D3ServeError, Overloaded, RequestError

MAX_HEAD_BYTES: Final = 32 * 2**10  # request line and headers; most proxies allow as much or less
MAX_FIELDS: Final = 128  # as pairs of small objects, 32 KiB of empty headers would take 2 MiB
MAX_PIPELINED: Final = 32  # requests that follow one before it is answered: a packet can hold thousands
FRAMING_RATIO: Final = 8  # bytes of chunk sizes for one of body: so that even a byte may be a chunk
UPLOADS: Final = b"/v1/files"  # the one body that is not held whole
HEAD_WITHIN_S = 30.0
BODY_WITHIN_S = 30.0  # and a second for each so many bytes, each way
BYTES_PER_S: Final = 128 * 2**10
PART_WITHIN_S = 5.0  # an answer that came before the request's end must be read before it is lost


class BoundedConnection(HttpToolsProtocol):
    """Closes a connection whose other side takes more time, or sends more, than the phase allows."""

    def __init__(self, *args: Any, open_connections: Connections, max_body_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open = open_connections
        self._max_body_bytes = self._most_body_bytes = max_body_bytes
        self._waits_since: float | None = None  # for a head
        self._body_since: float | None = None
        self._parts_since: float | None = None
        self._stuck_at: float | None = None  # when what we write must be taken
        self._running: RequestResponseCycle | None = (
            None  # uvicorn's own is the newest, which may wait in a pipeline
        )
        self._answered_early = False
        self._messages = self._framing_bytes = self._body_bytes = self._discarded_bytes = 0

    # --- phases ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Expect a head, if there is room for one more connection."""
        super().connection_made(transport)
        if self._open.add(self):
            self._waits_since = self.loop.time()
        else:
            self._refuse(Overloaded("this process has as many connections as it may; ask again"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        self._open.remove(self)
        super().connection_lost(exc)
        self._give_up_answers()

    def data_received(self, data: bytes) -> None:
        """Read on, and count what is no body: heads, chunk sizes and their extensions, trailers."""
        if self._parts_since is not None:
            self._discard(data)
            return
        messages, body_bytes = self._messages, self._body_bytes
        super().data_received(data)
        if messages != self._messages:
            self._framing_bytes = 0
            return
        self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
        if self._framing_bytes > MAX_HEAD_BYTES + FRAMING_RATIO * self._body_bytes:
            self.send_400_response("the request line and headers, or what frames the body, are too long")

    def on_message_begin(self) -> None:
        """Take the beginning of a head, unless too many requests wait already."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, but no trailer: nobody asks for those, and they would have no end."""
        if self._body_since is not None:
            return
        if len(self.headers) >= MAX_FIELDS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Take the head, which is as long as it may be, and expect a body."""
        self._messages += 1
        self._waits_since, self._body_since, self._body_bytes = None, self.loop.time(), 0
        self._most_body_bytes = MAX_UPLOAD_BYTES if self.url == UPLOADS else self._max_body_bytes
        self._open.works(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, unless nobody can want so much."""
        self._body_bytes += len(body)
        if self._body_bytes > self._most_body_bytes + BYTES_PER_S:  # whoever reads it refuses it before that
            raise ValueError("too long a body")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of a request; its answer may take its time."""
        self._messages += 1
        self._body_since, self._body_bytes = None, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Expect the next head, or part."""
        if self._answered_early and not self.transport.is_closing():
            self._part()
        super().on_response_complete()
        if self.cycle.response_complete and self._parts_since is None:
            self._waits_since = self.loop.time()
            self._open.waits(self)

    def pause_writing(self) -> None:
        """Give the other side time to take what stands in the buffer."""
        super().pause_writing()
        self._stuck_at = self.loop.time() + self._time_to_take()

    def resume_writing(self) -> None:
        """It did."""
        super().resume_writing()
        self._stuck_at = None

    # --- ends --------------------------------------------------------------------------------------

    def overdue(self, now_s: float) -> bool:
        """Whether the other side has used up its time."""
        if self.transport.is_closing() and self._stuck_at is None:
            self._stuck_at = now_s + self._time_to_take()
        if self._body_since is not None and self.flow.read_paused:
            self._body_since = now_s  # it is we who do not read
        body_within_s = BODY_WITHIN_S + self._body_bytes / BYTES_PER_S
        return (
            (self._stuck_at is not None and now_s > self._stuck_at)
            or (self._parts_since is not None and now_s > self._parts_since + PART_WITHIN_S)
            or (self._body_since is not None and now_s > self._body_since + body_within_s)
            or (self._waits_since is not None and now_s > self._waits_since + HEAD_WITHIN_S)
        )

    def cut(self) -> None:
        """Close at once, whatever is unsent."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too much of it."""
        self._refuse(RequestError(msg))

    def _refuse(self, error: D3ServeError) -> None:
        """Say why, if that cannot be taken for a part of another answer, and part."""
        if self.transport.is_closing() or self._parts_since is not None:
            return
        another = self._running
        if another is not None and another.response_started and not another.response_complete:
            self.transport.close()
            return
        response = problem_response(error, instance="", request_id="", headers={"Connection": "close"})
        lines = [b"%s: %s\r\n" % pair for pair in response.raw_headers]
        self.transport.write(
            b"".join([STATUS_LINE[error.http_status], *lines, b"\r\n", bytes(response.body)])
        )
        self._part()

    def _part(self) -> None:
        """Say that no more will come, and read on for a moment without looking.

        A socket that is closed while bytes come in makes the kernel of the other side throw away what it has not read
        yet, our answer among it.
        """
        self._parts_since = self.loop.time()
        self._open.waits(self)
        self._give_up_answers()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.transport.write_eof()

    def _discard(self, data: bytes) -> None:
        """Look at no more of a request that has its answer: as much as a body may have, then not even that.

        A flood that is read costs others a processor for as long as it is; one that is not waits in its own kernel.
        """
        self._discarded_bytes += len(data)
        if self._discarded_bytes > self._max_body_bytes:
            self.flow.pause_reading()

    def _give_up_answers(self) -> None:
        """Tell what is under way that nobody hears its answer."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.waiting_for_100_continue = False  # else it would write that
            self._running.message_event.set()

    def _time_to_take(self) -> float:
        return BODY_WITHIN_S + self.transport.get_write_buffer_size() / BYTES_PER_S

    # --- an answer before the request's end ----------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Let an answer that comes before the whole request was read be the last on the connection."""

        async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
            if not cycle.more_body:  # as with most: its end came with its beginning
                await app(scope, receive, send)
                return

            async def send_early(message: ASGISendEvent) -> None:
                if message["type"] == "http.response.start" and cycle.more_body:
                    self._answered_early = True
                    message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
                await send(message)
                if self._answered_early:
                    cycle.keep_alive = True  # else it would be closed with the answer, and the answer lost

            await app(scope, receive, send_early)

        self._running = cycle
        super()._start_asgi_task(cycle, answer)
