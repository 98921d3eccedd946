"""What `d3serve submit` reads: JSON lines or CSV, plain or gzip, a file or standard input, one line at a time."""

import csv
import gzip
import hashlib
import io
import json
import shutil
import stat
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Self, cast

from d3serve.errors import D3ServeError, InvalidJSON, InvalidRequest
from d3serve.text.strict_json import read_json
from d3serve.text.wording import shown

STDIN: Final = Path("-")
MAX_DEPTH: Final = 200  # what an API may be set to allow; its own limit is the one that counts
MAX_LINE_BYTES: Final = 64 * 2**20  # four times the largest body that an API takes as it comes
MAX_ID_CHARS: Final = 512
KEY_BYTES: Final = 16  # of a digest: two of a million lines are alike once in 10^26 files
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
GZIP: Final = b"\x1f\x8b"


class Identity(NamedTuple):
    """What a line keeps when it moves: `key` is of its `custom_id`, or else of what it asks; `request` is of that."""

    key: bytes
    request: bytes


def identity_of(custom_id: str | None, request: str) -> Identity:
    """The identity of a line, or of the row that answered it; `request` is the digest that both have."""
    digest = bytes.fromhex(request)[:KEY_BYTES]
    if custom_id is None:
        return Identity(digest, digest)
    return Identity(hashlib.sha256(b"custom_id " + custom_id.encode()).digest()[:KEY_BYTES], digest)


@dataclass(frozen=True)
class Line:
    """A line of the request file: its body, or why it holds none; `request` is the digest of what it asks."""

    number: int
    request: str
    custom_id: str | None = None
    body: Mapping[str, Any] | None = None
    refusal: D3ServeError | None = None
    size: int = 0  # bytes
    folder: Path = Path()  # where the images and videos lie that it names

    @property
    def identity(self) -> Identity:
        """What it keeps when it moves."""
        return identity_of(self.custom_id, self.request)


@dataclass
class RequestFile:
    """The lines of a file, as often as they are wanted; `questions` are asked by each line that has none of its own.

    Standard input, and whatever else can be read only once, is copied to a temporary file.

    Raises:
        InvalidRequest: it cannot be read.
    """

    path: Path
    questions: Mapping[str, Any] = field(default_factory=dict)
    as_csv: bool = False

    def __post_init__(self) -> None:
        try:
            if self.path == STDIN:
                self._file = _spooled(sys.stdin.buffer)
            else:
                self._file = open(self.path, "rb")  # noqa: SIM115 - closed by `close`
                if not stat.S_ISREG(self.path.stat().st_mode):
                    with self._file as once:
                        self._file = _spooled(once)
        except OSError as error:
            raise self._unreadable(error) from None
        self.as_csv = self.as_csv or ".csv" in self.path.suffixes[-2:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the file go."""
        self._file.close()

    @property
    def name(self) -> str:
        """What people call it."""
        return "standard input" if self.path == STDIN else str(self.path)

    def lines(self) -> Iterator[Line]:
        """Every line that says something, from the first; one that is no request holds its refusal.

        Raises:
            InvalidRequest: the file cannot be read, or is CSV whose columns make no requests.
        """
        seen: Counter[bytes] = Counter()
        try:
            for line in self._rows() if self.as_csv else self._objects():
                if line.custom_id is None:
                    seen[line.identity.key] += 1
                    if (place := seen[line.identity.key]) > 1:  # alike, and yet another line
                        yield replace(line, request=_digest([line.request, place]))
                        continue
                yield line
        except (OSError, EOFError, zlib.error) as error:
            raise self._unreadable(error) from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{self.name} is no CSV in UTF-8: {error}", field="requests") from None

    def _unreadable(self, error: Exception) -> InvalidRequest:
        told = getattr(error, "strerror", None) or error
        return InvalidRequest(f"cannot read {self.name}: {told}", field="requests")

    def _opened(self) -> IO[bytes]:
        """The text from its first byte, without what a compressor or an editor put around it."""
        self._file.seek(0)
        packed = self._file.read(len(GZIP)) == GZIP
        self._file.seek(0)
        text: IO[bytes] = io.BufferedReader(gzip.GzipFile(fileobj=self._file)) if packed else self._file
        if text.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            text.seek(0)
        return text

    # --- JSON lines --------------------------------------------------------------------------------

    def _objects(self) -> Iterator[Line]:
        file = self._opened()
        for number in count(1):
            text = file.readline(MAX_LINE_BYTES + 1)
            if not text:
                return
            if len(text) > MAX_LINE_BYTES:
                while text and not text.endswith(b"\n"):
                    text = file.readline(MAX_LINE_BYTES)
                error = InvalidRequest(f"it is longer than {MAX_LINE_BYTES} bytes")
                yield self._refused(number, _digest(["long", number]), MAX_LINE_BYTES, error)
            elif text.strip():
                yield self._object(number, text.rstrip(b"\n"))

    def _object(self, number: int, text: bytes) -> Line:
        try:
            body = read_json(text, max_depth=MAX_DEPTH)
            if not isinstance(body, dict):
                raise InvalidJSON("the body is no JSON object")
            custom_id = body.pop("custom_id", None)
            if custom_id is not None and not (
                isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_ID_CHARS
            ):
                raise InvalidRequest(
                    f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters, not {shown(custom_id)}"
                )
        except (InvalidJSON, InvalidRequest) as error:
            return self._refused(number, hashlib.sha256(text).hexdigest(), len(text), error)
        return self._line(number, custom_id, body, len(text))

    def _refused(self, number: int, request: str, size: int, error: D3ServeError) -> Line:
        message = error.message.replace("the body", "it", 1).replace("at line 1 column", "at column")
        return Line(number, request, refusal=type(error)(f"{self.name} line {number}: {message}"), size=size)

    def _line(self, number: int, custom_id: str | None, body: dict[str, Any], size: int) -> Line:
        if self.questions and "questions" not in body:
            body["questions"] = self.questions
        folder = Path() if self.path == STDIN else self.path.parent
        return Line(number, _digest([custom_id, body]), custom_id, body, size=size, folder=folder)

    # --- CSV ---------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[Line]:
        """The rows below the header, counted as a spreadsheet counts them."""
        csv.field_size_limit(MAX_LINE_BYTES)  # the default refuses a text of 131,073 characters
        text = io.TextIOWrapper(cast("io.BufferedReader", self._opened()), "utf-8", newline="")
        try:
            rows = csv.reader(text, strict=True)
            names = next(rows, [])
            self._check_columns(names)
            for number, row in enumerate(rows, 2):
                if any(row):
                    yield self._row(number, names, row)
        finally:
            text.detach()  # which would close the file that is read again

    def _row(self, number: int, names: list[str], row: list[str]) -> Line:
        size = sum(map(len, row))
        if len(row) != len(names):
            error = InvalidRequest(f"it has {len(row)} values under {len(names)} columns")
            return self._refused(number, _digest(row), size, error)
        values = dict(zip(names, row, strict=True))
        custom_id = values.pop("custom_id", None) or None
        return self._line(number, custom_id, {"state": values.get("state", values)}, size)

    def _check_columns(self, names: list[str]) -> None:
        """A state is the column `state`, or else an object of all columns but `custom_id`."""
        others = [name for name in names if name not in ("custom_id", "state")]
        told = None
        if doubled := next((name for name in names if names.count(name) > 1), None):
            told = f"has two columns {shown(doubled)}"
        elif "state" in names and others:
            told = f"has a column `state`, so only `custom_id` may stand beside it, not {shown(others[0])}"
        elif "state" not in names and not others:
            told = (
                "has no column that makes a state: give it a header with `state`, or with names of your own"
            )
        elif not self.questions:
            told = "holds states alone: say what is asked with --questions, --yes-no, --choice or --score"
        if told:
            raise InvalidRequest(f"{self.name} {told}", field="requests")


def _spooled(once: IO[bytes]) -> IO[bytes]:
    kept = tempfile.TemporaryFile()  # noqa: SIM115 - closed by whoever gets it
    shutil.copyfileobj(once, kept, 2**20)
    return kept


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
