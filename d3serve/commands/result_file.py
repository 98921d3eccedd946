"""The file that `d3serve submit` writes: one JSON line per request, held by one process at a time."""

import fcntl
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from d3serve.errors import D3ServeError, InvalidRequest
from d3serve.text.strict_json import read_json
from d3serve.text.wording import shown

ResultRow = Mapping[str, Any]
BEGINNING: Final = (
    b'{"line": '  # of every row: a last line that a crash cut off begins so, a file of somebody else's not
)
MAX_DEPTH: Final = 200  # far more than a row has


class ResultFile:
    """Results by line number, kept in a file: what a run finds, it keeps; what it adds is there at once.

    Raises:
        InvalidRequest: the file cannot be read or written, another process holds it, or it is no file of results.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: list[int] = []
        self._lines = 0
        try:
            self._file = self._open(os.O_RDWR | os.O_APPEND | os.O_CREAT)
            kind = os.fstat(self._file).st_mode
            self._is_file = stat.S_ISREG(kind)
            self.rows = self._read() if self._is_file else {}
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
        try:
            _write(self._file, _line(row))
        except OSError as error:
            if self._is_file:
                with suppress(OSError):
                    os.ftruncate(self._file, before)
            raise self._refusal("write", error) from None
        self.rows[row["line"]] = row

    def keep(self, wanted: Callable[[ResultRow], bool]) -> None:
        """Forget the rows that are not wanted; until the others stand in a new file, the old one stays.

        Raises:
            InvalidRequest: the new file cannot be written.
        """
        kept = {number: row for number, row in self.rows.items() if wanted(row)}
        if len(kept) == self._lines:
            return
        target = self._path.resolve()  # not the link that leads there
        fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
        try:
            descriptor = self._open(os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, fresh)
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._file).st_mode))
            _write(descriptor, b"".join(map(_line, kept.values())))
            os.fsync(descriptor)
            fresh.replace(target)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink()
            raise self._refusal("write", error) from None
        self._file, self.rows, self._lines = (
            descriptor,
            kept,
            len(kept),
        )  # the old one stays locked to the end

    def _open(self, flags: int, path: Path | None = None) -> int:
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

    def _read(self) -> dict[int, ResultRow]:
        with open(self._file, "rb", closefd=False) as file:
            *lines, cut = file.read().split(b"\n")
        rows: dict[int, ResultRow] = {}
        for line in lines:
            row = self._row(line)
            if row["line"] not in rows or row["status"] == "succeeded":
                rows[row["line"]] = row
        if not (cut.startswith(BEGINNING) or BEGINNING.startswith(cut)):
            self._row(cut)
        self._lines = len(lines) + bool(cut)
        return rows

    def _row(self, line: bytes) -> ResultRow:
        try:
            row = read_json(line, max_depth=MAX_DEPTH)
            if type(row["line"]) is int and isinstance(row["request"] + row["status"], str):
                found: ResultRow = row
                return found
        except (D3ServeError, KeyError, TypeError):
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
