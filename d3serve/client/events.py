"""Server-sent events from the bytes of a stream, by the rules of the HTML standard. Pure.

Own code, because httpx splits lines where Python does, also at U+2028, U+2029 and U+0085: a text that holds one
would break an event, or forge the next.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from d3serve.errors import InternalError
from d3serve.text.wording import shown

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_RETRY_S = 60.0


@dataclass(frozen=True)
class Event:
    """One server-sent event of a job."""

    id: str
    name: str
    data: Any


class Lines:
    """The lines of one stream; a chunk may end anywhere, inside a line end or a character too."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._after_cr = False
        self._first = True

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Take the next bytes; give the lines that they complete."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")  # the other half of a line end that was told already
            self._after_cr = False
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        *ended, rest = _LINE_END.split(chunk)
        for part in ended:
            line = b"".join((*self._begun, part))
            self._begun = []
            yield (line.removeprefix(_BYTE_ORDER_MARK) if self._first else line).decode("utf-8", "replace")
            self._first = False
        if rest:
            self._begun.append(rest)


@dataclass
class EventReader:
    """Turns the bytes of a job's stream into events; remembers the last id, to go on after a break."""

    last_id: str = ""
    retry_s: float = 0.0  # the pause before a reconnection that the server asked for, at most a minute
    ended: bool = False
    _lines: Lines = field(default_factory=Lines)
    _name: str = ""
    _data: list[str] = field(default_factory=list)
    _id: str = ""

    def reconnect(self) -> dict[str, str]:
        """Forget what was cut off; the headers that continue the stream."""
        self._lines, self._name, self._data, self._id = Lines(), "", [], self.last_id
        headers = {"Accept": "text/event-stream"}
        return headers | ({"Last-Event-ID": self.last_id} if self.last_id else {})

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Take the next bytes; give the events that they complete, the last of them `done`.

        Raises:
            InternalError: an event's data is no JSON.
        """
        for line in self._lines.feed(chunk):
            if line:
                self._take(line)
            elif (event := self._event()) is not None:
                self.ended = event.name == "done"
                yield event
                if self.ended:
                    return

    def _take(self, line: str) -> None:
        name, _, value = line.partition(
            ":"
        )  # a line that begins with a colon is a comment: a field without a name
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdecimal():
            self.retry_s = min(int(value[:9]) / 1000, MAX_RETRY_S)

    def _event(self) -> Event | None:
        name, data, self._name, self._data = self._name, self._data, "", []
        self.last_id = self._id
        if not data:
            return None
        text = "\n".join(data)
        try:
            return Event(self._id, name or "message", json.loads(text))
        except (ValueError, RecursionError):
            raise InternalError(f"an event of the stream holds no JSON: {shown(text, 200)}") from None
