"""A job's life as server-sent events: queued, started, progress, answer, done.

The events follow from the job's state, not from a log, so an id is a place in that life: attempt, phase and
number. A client that comes back with `Last-Event-ID` gets what lies after it; phases that passed while it
was away are told by their latest state.
"""

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any, Final

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.types import Send

from d3serve.api.resources import job_resource
from d3serve.errors import JobExpired, JobNotFound, ShuttingDown
from d3serve.store.records import JobRecord
from d3serve.store.waiters import Changes

PING_EVERY_S = 15.0  # proxies close a connection that says nothing for a minute
Place = tuple[int, int, int]
QUEUED, STARTED, PROGRESS, ANSWER, DONE = range(5)
# JSON escapes \n and \r; some readers of event streams also take these for the end of a line, and so of an event.
_LINE_BREAKS: Final = {ord(sign): f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"}
_ID: Final = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})")


def place_of(last_event_id: str | None) -> Place:
    """The place that a `Last-Event-ID` names; the very beginning if it is none of ours."""
    found = _ID.fullmatch(last_event_id or "")
    return (int(found[1]), int(found[2]), int(found[3])) if found else (-1, 0, 0)


class EventStream(EventSourceResponse):
    """An answer whose text ends when its client leaves; else the garbage collector would see to it, some day."""

    def __init__(self, text: AsyncGenerator[bytes, None]) -> None:
        super().__init__(text)
        self._text = text

    async def stream_response(self, send: Send) -> None:
        """Send the text, for as long as somebody reads."""
        async with aclosing(self._text):
            await super().stream_response(send)


async def stream(
    changes: Changes, fetch_result: Callable[[], Awaitable[bytes]], after: Place
) -> AsyncGenerator[bytes, None]:
    """The text of the event stream from `after` on; ends with the job, or with this process.

    A None among the changes becomes a comment, which keeps the connection open.
    """
    async with aclosing(changes) as records:
        with suppress(ShuttingDown, JobExpired, JobNotFound):  # the client comes back and is told
            async for job in records:
                if job is None:
                    yield format_sse_event(comment="still here")
                    continue
                again = (job.attempt + 1, QUEUED, 0)
                if job.status == "queued" and after > again:  # given back uncharged: its attempt begins anew
                    after = (job.attempt + 1, QUEUED, -1)
                result = await fetch_result() if job.status == "succeeded" else None
                for place, name, data in events_of(job, result):
                    if place > after:
                        after = place
                        yield _event(place, name, data)


def events_of(job: JobRecord, result: bytes | None) -> Iterator[tuple[Place, str, Any]]:
    """What there is to tell about the job as it is now, in order."""
    attempt = max(job.attempt, 1)
    if job.status == "queued":
        yield (
            (job.attempt + 1, QUEUED, 0),
            "queued",
            job_resource(job),
        )
    if job.started_at is not None:
        yield (attempt, STARTED, 0), "started", {"started_at": job.started_at, "attempt": job.attempt}
    if job.progress.fraction:
        told = {name: value for name, value in asdict(job.progress).items() if value is not None}
        del told["stage"]
        yield (attempt, PROGRESS, round(1000 * job.progress.fraction)), "progress", told
    if result is not None:
        for number, (name, answer) in enumerate(json.loads(result)["answers"].items()):
            yield (attempt, ANSWER, number), "answer", {"question": name, "answer": answer}
    if job.done:
        yield (attempt, DONE, 0), "done", job_resource(job)


def _event(place: Place, name: str, data: Any) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_LINE_BREAKS)
    return format_sse_event(id=".".join(map(str, place)), event=name, data_str=text)
