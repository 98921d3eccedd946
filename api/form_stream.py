"""A multipart/form-data body as it comes: short fields, and one file that is never held whole."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from d3serve.errors import InvalidRequest
from d3serve.text.wording import shown

MAX_FIELDS: Final = 16
MAX_FIELD_BYTES: Final = 4 * 2**10
MAX_HEAD_BYTES: Final = 4 * 2**10
_NAME: Final = re.compile(
    rb'^content-disposition:\s*form-data;[^\r\n]*?\bname="([^"\r\n]*)"', re.IGNORECASE | re.MULTILINE
)
_FILENAME: Final = re.compile(rb'\bfilename="([^"\r\n]*)"', re.IGNORECASE)
_ENCODING: Final = re.compile(
    rb"^content-transfer-encoding:\s*(?!binary|8bit|7bit)", re.IGNORECASE | re.MULTILINE
)
CUT_OFF: Final = "the multipart body is cut off: its last boundary is missing"


class FormStream:
    """Reads the parts of a body; what belongs to the part `file` is given on as it comes."""

    def __init__(self, stream: AsyncIterator[bytes], boundary: bytes) -> None:
        self._stream = stream
        self._mark = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # so that the first boundary looks like all others
        self.fields: dict[str, str] = {}
        self.filename: str | None = None

    async def read(self, take: Callable[[bytes], Awaitable[None]]) -> None:
        """Read the whole body; `fields`, and `filename` of the file, are known afterwards.

        Raises:
            InvalidRequest: it is cut off, a part has no name, comes twice or is too long, or there are too many.
        and what `take` raises.
        """
        await self._until_mark(_ignore, MAX_HEAD_BYTES)
        while await self._goes_on():
            name, filename = _named(await self._head())
            if name in self.fields or (name == "file" and self.filename is not None):
                raise InvalidRequest(f"two parts have the name {shown(name)}", field=name)
            if name == "file":
                self.filename = filename
                await self._until_mark(take, None)
                continue
            if len(self.fields) >= MAX_FIELDS:
                raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields")
            value = bytearray()

            async def collect(data: bytes, into: bytearray = value) -> None:
                into += data

            await self._until_mark(collect, MAX_FIELD_BYTES)
            self.fields[name] = value.decode(errors="replace")
        async for _ in self._stream:  # an epilogue, which nobody reads
            pass

    async def _goes_on(self) -> bool:
        """Whether a part follows the boundary that was just read, and not the end."""
        while len(self._buffer) < 2:
            await self._more()
        ends = self._buffer.startswith(b"--")
        if not ends and not self._buffer.startswith((b"\r\n", b" ", b"\t")):
            raise InvalidRequest("a boundary of the multipart body is followed by something else than a part")
        return not ends

    async def _head(self) -> bytes:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0 and len(self._buffer) <= MAX_HEAD_BYTES:
            await self._more()
        if not 0 <= end <= MAX_HEAD_BYTES:
            raise InvalidRequest(f"a part has headers of more than {MAX_HEAD_BYTES} bytes")
        head = bytes(self._buffer[: end + 2])
        del self._buffer[: end + 4]
        return head

    async def _until_mark(self, take: Callable[[bytes], Awaitable[None]], most: int | None) -> None:
        """Give on what comes before the next boundary, and read that."""
        size = 0
        while (end := self._buffer.find(self._mark)) < 0:
            if (sure := len(self._buffer) - len(self._mark) + 1) > 0:  # a boundary may begin in the rest
                size += sure
                await self._give(take, sure, size, most)
            await self._more()
        await self._give(take, end, size + end, most)
        del self._buffer[: len(self._mark)]

    async def _give(
        self, take: Callable[[bytes], Awaitable[None]], count: int, size: int, most: int | None
    ) -> None:
        if most is not None and size > most:
            raise InvalidRequest(f"a field of the form is longer than {most:,} bytes")
        if count:
            data = bytes(self._buffer[:count])
            del self._buffer[:count]
            await take(data)

    async def _more(self) -> None:
        async for data in self._stream:
            if data:
                self._buffer += data
                return
        raise InvalidRequest(CUT_OFF)


async def _ignore(_: bytes) -> None:
    pass


def _named(head: bytes) -> tuple[str, str]:
    """The name in the headers of a part, and that of its file."""
    name, filename = _NAME.search(head), _FILENAME.search(head)
    if name is None:
        raise InvalidRequest("a part of the multipart body has no name")
    if _ENCODING.search(head):
        raise InvalidRequest("a part is encoded; send its bytes as they are")
    return name[1].decode(errors="replace"), filename[1].decode(errors="replace") if filename else ""
