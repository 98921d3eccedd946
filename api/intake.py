"""From the bytes of a request's body to the texts that the job table stores, where that holds nobody up.

What takes long is the number of values, not the bytes of a text: a body that is large for its texts alone is read in
place, one at a time. Any other large body is read and checked in a process of its own: in a thread it would still stop
the event loop, since a parser's run keeps the interpreter's lock. What comes back are texts, which cost a copy.
"""

import asyncio
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import Any, Final

from d3serve.api import media
from d3serve.api.bodies import Body, read_payload
from d3serve.api.dialect import AnswerNames, answer_names, is_openai, to_system_one
from d3serve.api.multipart import REQUEST, split_parts
from d3serve.api.validation import check_request
from d3serve.errors import InternalError
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
    return _checked(payload, settings, any_dialect=any_dialect, parts=parts)


def _checked(
    payload: dict[str, Any], settings: Settings, *, any_dialect: bool, parts: media.Parts | None = None
) -> Taken:
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
        self._pool: ProcessPoolExecutor | None = None
        self._turn = asyncio.Lock()

    async def take_in(self, body: Body, *, any_dialect: bool = False) -> Taken:
        """The request in a decoded body. Raises like the function of this name, and InternalError."""
        if len(body.data) <= BRIEF_BYTES:
            return take_in(body, self._settings, any_dialect=any_dialect)
        if body.boundary is None and is_plain(body.data):
            async with self._turn:
                await asyncio.sleep(0)  # whatever else there is to do comes between two bodies
                payload = read_payload(body.data)
                if len(body.data) <= CHECKED_BYTES or _is_text(payload):
                    return _checked(payload, self._settings, any_dialect=any_dialect)
        return await self._take_in_elsewhere(body, any_dialect)

    async def _take_in_elsewhere(self, body: Body, any_dialect: bool) -> Taken:
        for _ in range(2):  # the process may have been killed for what its other body took
            pool = self._pool = self._pool or _start(self._settings)
            try:
                return await asyncio.get_running_loop().run_in_executor(pool, _take_in, body, any_dialect)
            except BrokenProcessPool:
                if self._pool is pool:
                    self._pool = None
        raise InternalError("the process that reads large bodies ended while it read this one")

    def close(self) -> None:
        """Let the processes end."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _start(settings: Settings) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(PROCESSES, get_context("spawn"), _begin, (settings,))


_settings: Settings  # of this process, if it is one that reads bodies


def _begin(settings: Settings) -> None:
    global _settings  # noqa: PLW0603 # an initializer has no other place
    _settings = settings
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the API ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """An executor's process waits for work for ever, also of a parent that was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _take_in(body: Body, any_dialect: bool) -> Taken:  # an executor passes by place
    return take_in(body, _settings, any_dialect=any_dialect)
