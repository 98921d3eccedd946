"""The lines of a batch: what goes in, what comes out. Pure, but for reading pieces of the input."""

import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from d3serve.api.bodies import read_payload
from d3serve.api.dialect import AnswerName, AnswerNames, from_system_one
from d3serve.api.problems import error_of, problem_response
from d3serve.errors import D3ServeError, InternalError, InvalidRequest, JobExpired
from d3serve.store.batches import Cursor, OutputKind
from d3serve.store.encode import to_json
from d3serve.store.files import FileRecord
from d3serve.store.pieces import Pieces, piece_name
from d3serve.store.records import JobRecord
from d3serve.text.wording import shown

ENDPOINTS: Final = ("/v1/decisions", "/v1/systemone")
MAX_LINES: Final = 50_000  # OpenAI's
MAX_LINES_IN_ALL: Final = 2 * MAX_LINES  # blank ones too: to read 200 MB of them takes a quarter of an hour
MAX_FINDINGS: Final = 100
MAX_ID_CHARS: Final = 512
MAX_RECENT: Final = 4  # pieces of 4 MiB
FIELDS: Final = ("custom_id", "method", "url", "body")
ENDINGS: Final = {
    "expired": ("batch_expired", "the batch expired before this request was done"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was done"),
    "failed": ("batch_failed", "the batch failed before this request was done: its input is no longer there"),
}


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch, and what its submitter calls it."""

    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """A line of an output file."""

    kind: OutputKind
    text: bytes


class RecentPieces:
    """Reads pieces, and keeps the last few: a batch reads on where it stopped a moment ago."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._recent: OrderedDict[str, str] = OrderedDict()

    async def get(self, name: str) -> str:
        """The text of a piece. Raises like `Pieces.get`."""
        if name not in self._recent:
            self._recent[name] = await self._pieces.get(name)
            if len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)
        self._recent.move_to_end(name)
        return self._recent[name]


class InputLines:
    """Reads lines from wherever a cursor stands; of a line, no more than a piece beyond `max_bytes` characters."""

    def __init__(self, pieces: RecentPieces, file: FileRecord, max_bytes: int) -> None:
        self._pieces = pieces
        self._file = file
        self._max_bytes = max_bytes

    async def next(self, cursor: Cursor) -> tuple[str | None, Cursor]:
        """The line at a cursor, None at the end, and where the next one stands. Of a line too long, its beginning.

        Raises:
            NotFound, StateLost: a piece is no longer there.
        """
        parts, size, (number, piece, at) = [], 0, cursor
        while piece <= self._file.pieces:
            text = await self._pieces.get(piece_name(self._file.id, piece))
            end = text.find("\n", at)
            if size <= self._max_bytes:
                parts.append(text[at : None if end < 0 else end])
                size += len(parts[-1])
            if end >= 0:
                return "".join(parts), Cursor(number + 1, piece, end + 1)
            piece, at = piece + 1, 0
        return "".join(parts) or None, Cursor(number + 1, piece, 0)


def read_line(text: str, endpoint: str, max_bytes: int) -> BatchLine:
    """The request on a line.

    Raises:
        InvalidJSON: it is not strict JSON.
        InvalidRequest: or no request to this endpoint; `field` names the place.
    """
    raw = text.encode()
    if len(raw) > max_bytes:
        raise InvalidRequest(f"the line is longer than {max_bytes:,} bytes")
    found = read_payload(raw.removeprefix(b"\xef\xbb\xbf"))
    for name in found:
        if name not in FIELDS:
            raise InvalidRequest(
                f"{shown(name)} is no field of a line; there are {', '.join(FIELDS)}", field=name
            )
    custom_id, body = found.get("custom_id"), found.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
        raise InvalidRequest(f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters", field="custom_id")
    if found.get("method") != "POST":
        raise InvalidRequest(f"method must be POST, not {shown(found.get('method'))}", field="method")
    if found.get("url") != endpoint:
        raise InvalidRequest(
            f"url must be the batch's endpoint, {endpoint}, not {shown(found.get('url'))}", field="url"
        )
    if not isinstance(body, dict):
        raise InvalidRequest(f"body must be a JSON object, not {shown(body)}", field="body")
    return BatchLine(custom_id, body)


class InputCheck:
    """Looks at each line of an input: counts the requests, and finds what is wrong with them."""

    def __init__(self, endpoint: str, max_bytes: int, findings: Sequence[dict[str, Any]] = ()) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._findings = list(findings)
        self._seen: dict[bytes, int] = {}
        self.count = 0
        self.is_over = False

    def look(self, text: str, number: int) -> None:
        """Look at a line; `is_over` says afterwards whether there is no need to look at more."""
        is_request = not text.isspace() and text != ""
        try:
            self._check_bounds(number, is_request=is_request)
            if is_request:
                self._check_new(read_line(text, self._endpoint, self._max_bytes).custom_id, number)
        except D3ServeError as error:
            self._findings.append(finding(error, number))
        self.is_over = self.is_over or len(self._findings) >= MAX_FINDINGS

    def findings(self) -> list[dict[str, Any]]:
        """What is wrong, as a batch's `errors` have it."""
        if not self.count and not self._findings:
            return [finding(InvalidRequest("the file has no requests"), None)]
        return self._findings

    def _check_bounds(self, number: int, *, is_request: bool) -> None:
        self.count += is_request
        self.is_over = self.count > MAX_LINES or number > MAX_LINES_IN_ALL
        if self.count > MAX_LINES:
            raise InvalidRequest(f"there are more than {MAX_LINES:,} requests")
        if number > MAX_LINES_IN_ALL:
            raise InvalidRequest(f"there are more than {MAX_LINES_IN_ALL:,} lines, blank ones included")

    def _check_new(self, custom_id: str, number: int) -> None:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        first = self._seen.setdefault(digest, number)
        if first != number:
            raise InvalidRequest(f"line {first} has the same custom_id", field="custom_id")


def finding(error: D3ServeError, line: int | None) -> dict[str, Any]:
    """What is wrong with an input, as a batch's `errors` have it."""
    return {"code": error.code, "line": line, "message": error.message, "param": error.field}


# --- what comes out --------------------------------------------------------------------------------


def label_of(custom_id: str, names: AnswerNames | None) -> str:
    """What must be known of a line when its job has ended."""
    return to_json([custom_id, names and [[name.name, name.options] for name in names]])


def outcome_of(endpoint: str, label: str, job_id: str, job: JobRecord | None, ending: str) -> Outcome:
    """The line for a job that has ended, or has gone (None). A canceled one is the batch's `ending`, if it has one."""
    custom_id, names = json.loads(label)
    if job is None:
        return failed(endpoint, custom_id, JobExpired(f"job {job_id} and its result were erased"), job_id)
    if job.status == "succeeded" and job.result is not None:
        return _succeeded(custom_id, job, job.result, names)
    if job.status == "canceled":
        return undone(
            custom_id, *ENDINGS.get(ending, ("job_canceled", "the job of this request was canceled"))
        )
    error = (
        error_of(job.error) if job.error else InternalError(f"job {job_id} is {job.status} and says not why")
    )
    return failed(endpoint, custom_id, error, job_id)


def _succeeded(custom_id: str, job: JobRecord, result: bytes, names: list[Any] | None) -> Outcome:
    body = result
    if names is not None:
        known = tuple(AnswerName(name, options) for name, options in names)
        body = to_json(from_system_one(known, json.loads(result), job.id)).encode()
    return Outcome("output", _row(custom_id, 200, job.id, body))


def failed(endpoint: str, custom_id: str, error: D3ServeError, request_id: str = "") -> Outcome:
    """The line for a request that got no answers: what its endpoint would have answered."""
    request_id = request_id or f"req_{secrets.token_hex(12)}"
    response = problem_response(error, instance=endpoint, request_id=request_id)
    return Outcome("error", _row(custom_id, response.status_code, request_id, bytes(response.body)))


def undone(custom_id: str, code: str, message: str) -> Outcome:
    """The line for a request that was not done."""
    told = {"custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}
    return Outcome("error", to_json({"id": _row_id(), **told}).encode() + b"\n")


def _row(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    head = to_json({"id": _row_id(), "custom_id": custom_id})[:-1]
    told = to_json({"status_code": status, "request_id": request_id})[:-1]
    return f'{head},"response":{told},"body":'.encode() + body.strip() + b'},"error":null}\n'


def _row_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
