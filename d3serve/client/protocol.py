"""The client without a network: what to send, what an answer means, when to try again. Pure.

Each operation is a generator that yields what should happen next (send this, sleep so long) and is told
what came of it. The two clients only carry that out, one blocking, one awaiting.
"""

import json
import random
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import httpx

from d3serve.errors import (
    D3ServeError,
    InternalError,
    InvalidRequest,
    JobNotFinished,
    StorageUnavailable,
    error_class,
)

POLL_S: Final = 30.0  # one long poll: below the minute after which proxies cut a silent connection
CONNECT_S: Final = 10.0
ANSWER_S: Final = 30.0
RETRIES: Final = 5
BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
MAX_RETRY_AFTER_S: Final = 60.0
RETRIED: Final = frozenset({429, 502, 503, 504})

T = TypeVar("T")


@dataclass(frozen=True)
class Send:
    """Send this request; the answer is a response, or the error that prevented one."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    read_s: float = ANSWER_S

    @property
    def timeout(self) -> httpx.Timeout:
        """Every wait has an end: connecting, writing, and the answer."""
        return httpx.Timeout(CONNECT_S, read=self.read_s)


@dataclass(frozen=True)
class Sleep:
    """Do nothing for so long."""

    seconds: float


Outcome = httpx.Response | httpx.TransportError | None
Steps = Generator[Send | Sleep, Outcome, T]


@dataclass(frozen=True)
class Job:
    """A job as the server told it; `raw` holds all of it. Trust `done`, not a list of final statuses."""

    id: str
    status: str
    done: bool
    attempt: int
    error: Mapping[str, Any] | None
    raw: Mapping[str, Any]

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Read the job resource."""
        return cls(body["id"], body["status"], body["done"], body["attempt"], body.get("error"), body)

    @property
    def result(self) -> Mapping[str, Any] | None:
        """The System One response, if the job succeeded and it was asked for."""
        return self.raw.get("result")


@dataclass(frozen=True)
class JobPage:
    """A page of jobs, newest first; `cursor` asks for the next one, None is the end."""

    jobs: tuple[Job, ...]
    cursor: str | None


@dataclass(frozen=True)
class Event:
    """One server-sent event of a job."""

    id: str
    name: str
    data: Any


def _path(job_id: str) -> str:
    """Where a job is; whatever its id holds, it stays one step of a path."""
    return f"/v1/jobs/{quote(job_id, safe='')}"


def submit(body: Mapping[str, Any], idempotency_key: str | None) -> Steps[Job]:
    """Post a job. A key is made if none is given, so that trying again can never make a second job.

    Raises:
        InvalidRequest: the body is no JSON: it holds NaN, half a surrogate pair, or a value of another type.
    """
    headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key or uuid.uuid4().hex}
    try:
        content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None
    response = yield from send(Send("POST", "/v1/jobs", content=content, headers=headers))
    return Job.from_json(response.json())


def get(job_id: str) -> Steps[Job]:
    """Read a job, with its result if it has one."""
    response = yield from send(Send("GET", _path(job_id), {"include": "result"}))
    return Job.from_json(response.json())


def wait(job_id: str, timeout_s: float | None) -> Steps[Job]:
    """Long-poll until the job says that it is done.

    Raises:
        JobNotFinished: not within `timeout_s`; the job goes on.
    """
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left = POLL_S if until is None else max(0.0, min(POLL_S, until - time.monotonic()))
        params = {"include": "result", "wait": round(left, 3)}
        response = yield from send(Send("GET", _path(job_id), params, read_s=left + ANSWER_S))
        job = Job.from_json(response.json())
        if job.done:
            return job
        if until is not None and time.monotonic() >= until:
            raise JobNotFinished(
                f"job {job_id} is {job.status} after {timeout_s:g} s", details={"status": job.status}
            )


def result(job_id: str) -> Steps[Mapping[str, Any]]:
    """The System One response.

    Raises:
        JobNotFinished: there is none yet; or the error by which the job failed.
    """
    response = yield from send(Send("GET", f"{_path(job_id)}/result"))
    body: Mapping[str, Any] = response.json()
    return body


def act(method: str, job_id: str, action: str = "") -> Steps[Job | None]:
    """Cancel, retry (`POST` with the action) or erase (`DELETE`)."""
    response = yield from send(Send(method, f"{_path(job_id)}{action}"))
    return Job.from_json(response.json()) if response.content else None


def list_jobs(filters: Mapping[str, Any], metadata: Mapping[str, str]) -> Steps[JobPage]:
    """One page of the caller's jobs."""
    params = {name: value for name, value in filters.items() if value is not None}
    params |= {f"metadata[{name}]": value for name, value in metadata.items()}
    response = yield from send(Send("GET", "/v1/jobs", params))
    body = response.json()
    return JobPage(tuple(Job.from_json(job) for job in body["data"]), body["cursor"])


def send(request: Send) -> Steps[httpx.Response]:
    """Send, and send again while that can help: no connection, 429, 502, 503, 504. All our requests are idempotent.

    Raises:
        D3ServeError: what the server refused with, as the class of its code; StorageUnavailable if nobody
            answered at all.
    """
    for attempt in range(RETRIES + 1):
        outcome = yield request
        if isinstance(outcome, httpx.Response) and outcome.is_success:
            return outcome
        retried = not isinstance(outcome, httpx.Response) or outcome.status_code in RETRIED
        if not retried or attempt == RETRIES:
            break
        yield Sleep(pause_s(outcome, attempt))
    if isinstance(outcome, httpx.Response):
        raise refusal(outcome)
    raise StorageUnavailable(f"no answer from {_origin(outcome)}: {outcome}") from outcome


def _origin(outcome: Outcome) -> str:
    """The server that gave no answer, as far as is known."""
    if isinstance(outcome, httpx.TransportError):
        with suppress(RuntimeError):  # nothing was sent
            url = outcome.request.url
            return f"{url.scheme}://{url.netloc.decode()}"
    return "the server"


def pause_s(outcome: Outcome, attempt: int) -> float:
    """How long to wait before the next try: what the server asks for, at most a minute; else more each time."""
    backoff = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)] * random.uniform(0.75, 1.25)  # noqa: S311 - not a secret
    if isinstance(outcome, httpx.Response):
        for header, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
            text = outcome.headers.get(header, "")
            if text.isdecimal():
                return min(max(float(text) * unit, 0.0), MAX_RETRY_AFTER_S)
    return backoff


def refusal(response: httpx.Response) -> D3ServeError:
    """The error that a response tells, as a class of our tree; `details` hold status, request id and findings."""
    details: dict[str, Any] = {
        "status": response.status_code,
        "request_id": response.headers.get("x-request-id"),
    }
    try:
        body = response.json()
        kind = error_class(body["code"])
        details["errors"] = body.get("errors", [])
        return kind(body["detail"], field=body["error"].get("field"), details=details)
    except (ValueError, KeyError, TypeError, AttributeError):
        text = response.text[:200]
        return InternalError(f"the server answered {response.status_code}: {text}", details=details)


class EventReader:
    """Turns the lines of an event stream into events; remembers the last id, to go on after a break."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        self._fields: dict[str, str] = {}

    def request(self, job_id: str) -> Send:
        """The request that continues the stream."""
        headers = {"Accept": "text/event-stream"}
        if self.last_id is not None:
            headers["Last-Event-ID"] = self.last_id
        return Send("GET", f"{_path(job_id)}/events", headers=headers)

    def feed(self, line: str) -> Iterator[Event]:
        """Take one line; give the event that it completes, if it does."""
        if line:
            name, _, value = line.partition(":")
            self._fields[name] = value.removeprefix(" ")
            return
        fields, self._fields = self._fields, {}
        if "event" in fields:
            self.last_id = fields.get("id", self.last_id)
            yield Event(fields.get("id", ""), fields["event"], json.loads(fields.get("data", "null")))
