"""From the bytes of a request's body to the texts that the job table stores, where that holds nobody up.

What takes long is the number of values, not the bytes of a text: a body that is large for its texts alone is read in
place, one at a time. Any other large body is read and checked in a process of its own: in a thread it would still stop
the event loop, since a parser's run keeps the interpreter's lock. What comes back are texts, which cost a copy.
"""

import asyncio
import os
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any, Final, cast

from d3serve.api import media
from d3serve.api.bodies import Body, read_payload
from d3serve.api.dialect import AnswerNames, answer_names, is_openai, to_system_one
from d3serve.api.multipart import REQUEST, split_parts
from d3serve.api.validation import check_request
from d3serve.errors import D3ServeError, InternalError, ShuttingDown
from d3serve.settings import Settings
from d3serve.store.encode import EncodedRequest, encode_request, to_json
from d3serve.text.strict_json import is_short_beside_strings

# Of a body that is read in place, which takes about 10 ms at the worst.
PLAIN_BYTES: Final = 2**20  # a text for the longest prompt, with room for its escapes
VALUES_BYTES: Final = 16 * 2**10  # beside what its strings hold
CHECKED_BYTES: Final = 64 * 2**10  # beside its state, of which little is asked
BRIEF_BYTES: Final = 4 * 2**10  # a whole body that is read in less time than it takes to wait for a turn
PROCESSES: Final = 2  # large bodies that are read at once: one that takes long holds up no other
NICE: Final = 5  # they get a third of a processor that somebody else wants: whoever waits for an event loop


@dataclass(frozen=True)
class Taken:
    """A request that has been checked; `names` is what OpenAI's dialect calls things, None in System One's."""

    request: EncodedRequest
    names: AnswerNames | None


def take_in(body: Body, settings: Settings, *, any_dialect: bool) -> Taken:
    """The request in a decoded body, or in its part for that.

    Raises:
        InvalidJSON: the body is not strict JSON.
        InvalidRequest: or a subclass; `details["errors"]` lists up to ten findings.
    """
    parts = split_parts(body.data, body.boundary) if body.boundary else {REQUEST: body.data}
    payload = read_payload(parts.pop(REQUEST))
    return check_payload(payload, settings, any_dialect=any_dialect, parts=parts)


def check_payload(
    payload: dict[str, Any], settings: Settings, *, any_dialect: bool, parts: media.Parts | None = None
) -> Taken:
    """The request that a JSON object is. Raises InvalidRequest like `take_in`."""
    payload, files = media.take_media(
        payload, parts or {}, settings, messages=any_dialect and is_openai(payload)
    )
    openai = any_dialect and is_openai(payload)
    decision = to_system_one(payload, settings) if openai else check_request(payload, settings)
    return Taken(encode_request(decision, files), answer_names(payload) if openai else None)


def is_plain(body: bytes) -> bool:
    """Whether a body is short beside what its strings hold."""
    return len(body) <= VALUES_BYTES or (
        len(body) <= PLAIN_BYTES and is_short_beside_strings(body, VALUES_BYTES)
    )


def _is_text(payload: dict[str, Any]) -> bool:
    """Whether a request has no files, and what is checked most closely is short."""
    if payload.keys() & media.FIELDS or isinstance(payload.get("input"), list):
        return False
    others = {name: value for name, value in payload.items() if name not in ("state", "input")}
    return len(to_json(others)) <= CHECKED_BYTES


class Intake:
    """Takes bodies in: plain ones in place, others in processes that start with the first of them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._readers = _Readers(settings)
        self._turn = asyncio.Lock()

    async def take_in(self, body: Body, *, any_dialect: bool = False) -> Taken:
        """The request in a decoded body. Raises like the function of this name, InternalError and ShuttingDown."""
        if len(body.data) <= BRIEF_BYTES:
            return take_in(body, self._settings, any_dialect=any_dialect)
        if body.boundary is None and is_plain(body.data):
            async with self._turn:
                await asyncio.sleep(0)  # whatever else there is to do comes between two bodies
                payload = read_payload(body.data)
                if len(body.data) <= CHECKED_BYTES or _is_text(payload):
                    return check_payload(payload, self._settings, any_dialect=any_dialect)
        return await self._readers.take_in(body, any_dialect)

    def close(self) -> None:
        """End the processes, also one that is starting or at work."""
        self._readers.close()


class _Reader:
    """A process that reads bodies, one at a time.

    Of its own, with a pipe of its own: processes of an executor share locks, and one that is killed keeps what it has.
    """

    def __init__(self, settings: Settings) -> None:
        context = get_context("spawn")
        self._channel, theirs = context.Pipe()
        with theirs:
            self._process = context.Process(target=_read_bodies, args=(theirs, settings), daemon=True)
            self._process.start()

    def ask(self, body: Body, any_dialect: bool) -> Taken | Exception:
        self._channel.send((body, any_dialect))
        return cast("Taken | Exception", self._channel.recv())

    def end(self) -> None:
        self._process.kill()
        self._process.join()


class _Readers:
    """Some processes that read bodies, as many as are needed at once; one that ends is replaced."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(PROCESSES, "d3serve-intake")  # one waits for each process
        self._lock = threading.Lock()
        self._all: set[_Reader] = set()
        self._idle: list[_Reader] = []
        self._closed = False

    async def take_in(self, body: Body, any_dialect: bool) -> Taken:
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._take_in, body, any_dialect
        )

    def close(self) -> None:
        with self._lock:  # nobody starts one meanwhile, or later
            self._closed = True
            for reader in self._all:
                reader.end()
        self._threads.shutdown()  # whoever waits, for an answer or for a turn, hears of it

    def _take_in(self, body: Body, any_dialect: bool) -> Taken:
        for _ in range(2):  # it may have been killed for what the other one took
            reader = self._borrow()
            try:
                told = reader.ask(body, any_dialect)
            except Exception:  # it ended, or says what cannot be read
                self._drop(reader)
                continue
            self._idle.append(reader)
            if isinstance(told, Exception):
                raise told
            return told
        self._check_open()
        raise InternalError("the process that reads large bodies ended while it read this one")

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDown("the API is stopping")

    def _borrow(self) -> _Reader:
        with self._lock:
            self._check_open()
            if self._idle:
                return self._idle.pop()
            reader = _Reader(self._settings)
            self._all.add(reader)
            return reader

    def _drop(self, lost: _Reader) -> None:
        """End it, and those that are idle: what ended one may have ended them too, and the next try is the last."""
        with self._lock:
            for reader in (lost, *self._idle):
                self._all.discard(reader)
                reader.end()
            self._idle.clear()


def _read_bodies(channel: Connection, settings: Settings) -> None:
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the API ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        body, any_dialect = channel.recv()
        try:
            told: Taken | Exception = take_in(body, settings, any_dialect=any_dialect)
        except D3ServeError as error:
            told = error
        except Exception as error:  # for the log of whoever asked
            error.add_note(traceback.format_exc())
            told = error
        channel.send(told)


def _end_with_parent() -> None:
    """Who reads a body does not notice that its parent was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)
