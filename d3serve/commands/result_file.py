"""The file that `d3serve submit` writes: one JSON line per request, held by one process at a time."""

import fcntl
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from d3serve.commands.request_file import identity_of
from d3serve.errors import D3ServeError, InvalidRequest
from d3serve.text.strict_json import read_json
from d3serve.text.wording import shown

ResultRow = Mapping[str, Any]
STDOUT: Final = Path("-")
BEGINNING: Final = (
    b'{"line": '  # of every row: a last line that a crash cut off begins so, a file of somebody else's not
)
NUMBER: Final = re.compile(rb'(?<=^\{"line": )(\d+|null)(?=, )')
MAX_DEPTH: Final = 200  # far more than a row has


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a row stands, how long it is, and what of it a run must know; `code` is '' where it succeeded."""

    offset: int
    size: int
    number: int | None
    request: bytes
    code: str


class ResultFile:
    """Results by the keys of their lines, kept in a file: what a run finds, it keeps; what it adds is there at once.

    In memory stands where each row is, and not what it says.

    Raises:
        InvalidRequest: the file cannot be read or written, another process holds it, or it is no file of results.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: list[int] = []
        self._rows = 0  # in the file, those that others stand for too
        self.entries: dict[bytes, RowPlace] = {}
        try:
            self._file = self._open(os.O_RDWR | os.O_APPEND | os.O_CREAT)
            self.is_file = path != STDOUT and stat.S_ISREG(os.fstat(self._file).st_mode)
            if self.is_file:
                self._read()
        except OSError as error:
            self.close()
            raise self._refusal("write", error) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the file."""
        for descriptor in self._opened:
            os.close(descriptor)
        self._opened = []

    def add(self, row: ResultRow) -> None:
        """Append a result. What a full disk cut off does not stay.

        Raises:
            InvalidRequest: it cannot be written.
        """
        before = os.fstat(self._file).st_size
        line = _line(row)
        try:
            _write(self._file, line)
        except OSError as error:
            if self.is_file:
                with suppress(OSError):
                    os.ftruncate(self._file, before)
            raise self._refusal("write", error) from None
        self._index(row, before, len(line))

    def rewrite(self, wanted: Iterable[tuple[bytes, int | None]]) -> None:
        """Keep the rows of these keys, in this order and with these line numbers, and forget all others.

        Until they stand in a new file, the old one stays. A file that is so already is left as it is.

        Raises:
            InvalidRequest: the new file cannot be written.
        """
        kept = list(wanted)
        if self._is_so(kept):
            return
        target = self._path.resolve()  # not the link that leads there
        fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
        try:
            descriptor = self._open(os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, fresh)
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._file).st_mode))
            entries = dict(self._copied(kept, descriptor))
            os.fsync(descriptor)
            fresh.replace(target)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink()
            raise self._refusal("write", error) from None
        self._file = descriptor  # the old one stays locked to the end
        self.entries, self._rows = entries, len(entries)

    def _is_so(self, kept: list[tuple[bytes, int | None]]) -> bool:
        if not self.is_file:
            return True
        end = -1
        for key, number in kept:
            entry = self.entries[key]
            if entry.number != number or entry.offset < end:
                return False
            end = entry.offset
        return len(kept) == self._rows

    def _copied(self, kept: list[tuple[bytes, int | None]], to: int) -> Iterator[tuple[bytes, RowPlace]]:
        offset = 0
        for key, number in kept:
            old = self.entries[key]
            told = b"null" if number is None else b"%d" % number
            line = NUMBER.sub(told, os.pread(self._file, old.size, old.offset), count=1)
            _write(to, line)
            yield key, RowPlace(offset, len(line), number, old.request, old.code)
            offset += len(line)

    def _open(self, flags: int, path: Path | None = None) -> int:
        if self._path == STDOUT:
            descriptor = os.dup(sys.stdout.fileno())
            self._opened.append(descriptor)
            return descriptor
        descriptor = os.open(path or self._path, flags | os.O_CLOEXEC, 0o666)
        self._opened.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = path is not None or os.path.samestat(os.fstat(descriptor), self._path.stat())
        except BlockingIOError:
            ours = False
        except OSError:
            ours = True  # a file system without locks
        if not ours:  # held, or replaced since it was opened
            raise InvalidRequest(
                f"another `d3serve submit` is writing {self._path}: wait for its end, or choose another --out",
                field="out",
            )
        return descriptor

    def _read(self) -> None:
        offset = 0
        with open(self._file, "rb", closefd=False) as file:
            for line in file:
                if line.endswith(b"\n"):
                    self._index(self._row(line[:-1]), offset, len(line))
                elif not (line.startswith(BEGINNING) or BEGINNING.startswith(line)):
                    self._row(line)
                else:
                    self._rows += 1  # cut off by a crash
                offset += len(line)

    def _index(self, row: ResultRow, offset: int, size: int) -> None:
        self._rows += 1
        key, request = identity_of(row.get("custom_id"), row["request"])
        succeeded = row["status"] == "succeeded"
        code = "" if succeeded else sys.intern(str((row.get("error") or {}).get("code", row["status"])))
        before = self.entries.get(key)
        if succeeded or before is None or before.code:
            self.entries[key] = RowPlace(offset, size, row["line"], request, code)

    def _row(self, line: bytes) -> ResultRow:
        try:
            row = read_json(line, max_depth=MAX_DEPTH)
            number, custom_id = row["line"], row.get("custom_id")
            if (number is None or type(number) is int) and isinstance(row["status"] + (custom_id or ""), str):
                bytes.fromhex(row["request"])
                found: ResultRow = row
                return found
        except (D3ServeError, KeyError, TypeError, ValueError, AttributeError):
            pass
        raise InvalidRequest(
            f"{self._path} holds a line that is no result of ours: {shown(line.decode('utf-8', 'replace'))}",
            field="out",
        )

    def _refusal(self, what: str, error: OSError) -> InvalidRequest:
        return InvalidRequest(f"cannot {what} {self._path}: {error.strerror}", field="out")


def _line(row: ResultRow) -> bytes:
    text = json.dumps(row, ensure_ascii=False)
    return (
        text.encode("utf-8", "backslashreplace") + b"\n"
    )  # half a surrogate pair, of a file's name, as JSON has it


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
