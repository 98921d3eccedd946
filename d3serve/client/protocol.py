"""The client without a network: what to send, what an answer means, when to try again. Pure.

Each operation is a generator that yields what should happen next (send this, sleep so long) and is told
what came of it. The two clients only carry that out, one blocking, one awaiting.
"""

import json
import math
import random
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import quote

import httpx

from d3serve.client.events import EventReader
from d3serve.client.jobs import Job, JobPage
from d3serve.client.questions import Answers
from d3serve.client.server import Server
from d3serve.errors import (
    D3ServeError,
    Forbidden,
    InternalError,
    InvalidRequest,
    JobExpired,
    JobNotFinished,
    RequestError,
    StorageUnavailable,
    Unauthorized,
    error_class,
)
from d3serve.text.wording import shown

POLL_S: Final = 30.0  # one long poll: below the minute after which proxies cut a silent connection
CONNECT_S: Final = 10.0
ANSWER_S: Final = 30.0
PATIENCE_S: Final = (
    60.0  # how long trouble may last before it is told: an API restarts in seconds, a window of
)
# requests per minute opens again in sixty
BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
MAX_RETRY_AFTER_S: Final = 60.0
AT_ONCE: Final = 64  # jobs of a map at the server: some turns, so that none waits for the client
RETRIES: Final = 2  # of a job whose worker failed it: a third worker that fails it too is no chance
RETRIED: Final = frozenset({429, 502, 503, 504})
FOREIGN: Final = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, httpx.CookieConflict, UnicodeError)

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
    patience_s: float = math.inf  # trouble is told earlier than the client's own patience ends

    @property
    def timeout(self) -> httpx.Timeout:
        """Every wait has an end: connecting, writing, and the answer."""
        return httpx.Timeout(CONNECT_S, read=self.read_s)


@dataclass(frozen=True)
class Sleep:
    """Do nothing for so long."""

    seconds: float


Outcome = httpx.Response | Exception | None
Steps = Generator[Send, httpx.Response, T]  # an operation; it is told of answers that are a success
Patient = Generator[Send | Sleep, Outcome, T]  # the same with its retries


def step(path: str, name: str) -> str:
    """One step below a path, whatever the name holds."""
    return f"{path}/{quote(name, safe='', errors='replace')}"


def _path(job_id: str) -> str:
    return step("/v1/jobs", job_id)


def ping() -> Steps[None]:
    """See whether a d3serve server answers."""
    response = yield Send("GET", "/healthz")
    _read(response, lambda body: body["status"])


def submit(body: Mapping[str, Any], idempotency_key: str | None) -> Steps[Job]:
    """Post a job. A key is made if none is given, so that trying again can never make a second job.

    Raises:
        InvalidRequest: the body is no JSON: it holds NaN, half a surrogate pair, or a value of another type.
    """
    headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key or uuid.uuid4().hex}
    response = yield Send("POST", "/v1/jobs", content=_written(body), headers=headers)
    return _read(response, Job.from_json)


def count(body: Mapping[str, Any]) -> Steps[Mapping[str, Any]]:
    """Count what a job of this body would read.

    Raises:
        InvalidRequest: as `submit`.
    """
    headers = {"Content-Type": "application/json"}
    response = yield Send("POST", "/v1/count", content=_written(body), headers=headers)
    return _read(response, dict)


def _written(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None


def get(job_id: str) -> Steps[Job]:
    """Read a job, with its result if it has one."""
    response = yield Send("GET", _path(job_id), {"include": "result"})
    return _read(response, Job.from_json)


def asked(job_id: str) -> Steps[Mapping[str, Any]]:
    """What a job was asked, while that is kept."""
    response = yield Send("GET", _path(job_id), {"include": "request"})

    def meaning(body: Any) -> Mapping[str, Any]:
        told: Mapping[str, Any] = {"state": body["asked"]["state"], **body["asked"]}
        return told

    return _read(response, meaning)


def wait(job_id: str, timeout_s: float | None) -> Steps[Job]:
    """Long-poll until the job says that it is done.

    Raises:
        JobNotFinished: not within `timeout_s`; the job goes on.
    """
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left = POLL_S if until is None else max(0.0, min(POLL_S, until - time.monotonic()))
        params = {"include": "result", "wait": round(left, 3)}
        patience_s = math.inf if until is None else until - time.monotonic()
        response = yield Send("GET", _path(job_id), params, read_s=left + ANSWER_S, patience_s=patience_s)
        job = _read(response, Job.from_json)
        if job.done:
            return job
        if until is not None and time.monotonic() >= until:
            raise JobNotFinished(
                f"job {job_id} is {job.status} after {timeout_s:g} s", details={"status": job.status}
            )


def of_this_state(error: RequestError) -> RequestError:
    """The error, if it is about one submission; what any other would be told as well is raised."""
    if error.retryable or isinstance(error, Unauthorized | Forbidden):
        raise error
    return error


def settle(job: Job, retries: int) -> Steps[Answers | D3ServeError]:
    """The answers of a job, or why it has none. One that failed through no fault of its request is run again."""
    while True:
        job = yield from wait(job.id, None)
        failure = job.failure
        if failure is None:
            return job.result or (yield from result(job.id))
        if job.status != "failed" or isinstance(failure, RequestError) or retries <= 0:
            return failure
        retries -= 1
        try:
            yield from act("POST", job.id, "/retry")
        except JobExpired:  # its input is gone
            return failure


def result(job_id: str) -> Steps[Answers]:
    """The System One response.

    Raises:
        JobNotFinished: there is none yet; or the error by which the job failed.
    """
    response = yield Send("GET", f"{_path(job_id)}/result")
    return _read(response, Answers.from_json)


def act(method: str, job_id: str, action: str = "") -> Steps[Job | None]:
    """Cancel, retry (`POST` with the action) or erase (`DELETE`)."""
    response = yield Send(method, f"{_path(job_id)}{action}")
    return _read(response, Job.from_json) if response.content else None


def list_jobs(filters: Mapping[str, Any], metadata: Mapping[str, str]) -> Steps[JobPage]:
    """One page of the caller's jobs."""
    params = {name: value for name, value in filters.items() if value is not None}
    params |= {f"metadata[{name}]": value for name, value in metadata.items()}
    response = yield Send("GET", "/v1/jobs", params)
    return _read(
        response, lambda body: JobPage(tuple(Job.from_json(job) for job in body["data"]), body["cursor"])
    )


def models() -> Steps[tuple[Mapping[str, Any], ...]]:
    """What is served."""
    response = yield Send("GET", "/v1/models")
    return _read(response, lambda body: tuple(body["models"]))


def queue() -> Steps[Mapping[str, Any]]:
    """How much waits."""
    return (yield from read("/v1/queue"))


def read(path: str, params: Mapping[str, Any] | None = None) -> Steps[Mapping[str, Any]]:
    """Any resource, as the HTTP API has it."""
    response = yield Send("GET", path, params or {})
    return _read(response, _resource)


def change(method: str, path: str, body: Mapping[str, Any] | None = None) -> Steps[Mapping[str, Any]]:
    """Make, change or remove a resource; what came of it, if the answer says that."""
    content = json.dumps(body, allow_nan=False).encode() if body is not None else None
    headers = {"Content-Type": "application/json"} if body is not None else {}
    response = yield Send(method, path, content=content, headers=headers)
    return _read(response, _resource) if response.content else {}


def _resource(body: Any) -> Mapping[str, Any]:
    told: Mapping[str, Any] = {"object": body["object"], **body}
    return told


def events(job_id: str, reader: EventReader) -> Send:
    """The request that begins, or continues, the stream of a job's events."""
    return Send("GET", f"{_path(job_id)}/events", headers=reader.reconnect())


class _Strange(Exception):
    """An answer that is a success, but none of d3serve's."""


def _read(response: httpx.Response, meaning: Callable[[Any], T]) -> T:
    try:
        return meaning(response.json())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _Strange from None


def patiently(steps: Steps[T], server: Server, patience_s: float) -> Patient[T]:
    """The operation, each request of it sent again while that can help and trouble lasts no longer than `patience_s`.

    Every request of ours may be sent twice: submissions carry a key, the others change nothing by repetition.

    Raises:
        D3ServeError: what the server refused with, as the class of its code; StorageUnavailable if nobody
            answered at all.
    """
    trouble = Trouble(server, patience_s)
    try:
        step = next(steps)
        while True:
            outcome = yield step
            if isinstance(outcome, httpx.Response) and outcome.is_success:
                trouble.over()
                try:
                    step = steps.send(outcome)
                except _Strange:
                    raise _stranger(outcome, server.via) from None
            else:
                yield Sleep(trouble.pause_s(outcome, step.patience_s))
    except StopIteration as end:
        value: T = end.value
        return value


class Trouble:
    """What stands between us and an answer, and for how long it has."""

    def __init__(self, server: Server, patience_s: float) -> None:
        self._server = server
        self._patience_s = patience_s
        self._since: float | None = None
        self._tries = 0

    def over(self) -> None:
        """There is an answer."""
        self._since, self._tries = None, 0

    def heard(self) -> None:
        """The server lives, but what it said may be nothing new: patience begins again, pauses stay long."""
        self._since = None

    def pause_s(self, outcome: Outcome, patience_s: float = math.inf) -> float:
        """How long to wait before the next try.

        Raises:
            D3ServeError: trying again cannot help, or has been tried for long enough.
        """
        now = time.monotonic()
        since = self._since = now if self._since is None else self._since
        wait_s = pause_s(outcome, self._tries)
        self._tries += 1
        if not _may_pass(outcome) or now + wait_s > since + min(patience_s, self._patience_s):
            raise self._complaint(outcome)
        return wait_s

    def _complaint(self, outcome: Outcome) -> D3ServeError:
        match outcome:
            case httpx.Response() if is_stream(outcome):
                return StorageUnavailable("the event stream breaks off, again and again")
            case httpx.Response():
                return refusal(outcome, self._server.via)
            case (
                httpx.UnsupportedProtocol() | httpx.LocalProtocolError() | UnicodeError() | httpx.InvalidURL()
            ):
                return InvalidRequest(f"the request cannot be sent: {outcome}")
            case httpx.TransportError():
                return self._server.silence(outcome)
            case _:
                return InternalError(f"the answer{self._server.via} cannot be read: {outcome}")


def is_stream(response: httpx.Response) -> bool:
    """Whether the answer is a stream of events."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return response.is_success and kind == "text/event-stream"


def _may_pass(outcome: Outcome) -> bool:
    """Whether it may be gone at the next try.

    A 500 that does not speak as d3serve does comes from a server that is being stopped, or from a proxy before it.
    """
    if isinstance(outcome, httpx.Response):
        status = outcome.status_code
        return is_stream(outcome) or status in RETRIED or (status >= 500 and _told(outcome) is None)
    ours = httpx.UnsupportedProtocol | httpx.LocalProtocolError
    return isinstance(outcome, httpx.TransportError) and not isinstance(outcome, ours)


def pause_s(outcome: Outcome, attempt: int) -> float:
    """How long to wait before the next try: what the server asks for, at most a minute; else more each time."""
    backoff = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)] * random.uniform(0.75, 1.25)  # noqa: S311 - not a secret
    if isinstance(outcome, httpx.Response):
        for header, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
            text = outcome.headers.get(header, "")
            if text.isdecimal():
                return min(max(float(text) * unit, 0.0), MAX_RETRY_AFTER_S)
    return backoff


def refusal(response: httpx.Response, via: str = "") -> D3ServeError:
    """The error that a response tells, as a class of our tree; `details` hold status, request id and findings."""
    return _told(response) or _stranger(response, via)


def _told(response: httpx.Response) -> D3ServeError | None:
    """The error of a body that d3serve wrote."""
    try:
        body = response.json()
        kind, message, field_name = error_class(body["code"]), body["detail"], body["error"].get("field")
        return kind(
            message, field=field_name, details=_details(response) | {"errors": body.get("errors", [])}
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _stranger(response: httpx.Response, via: str = "") -> InternalError:
    """The error that what answered is no d3serve server."""
    where = response.headers.get("location")
    text = f"a redirect to {shown(where, 200)}" if where else shown(response.text, 200)
    return InternalError(
        f"the server{via} answered {response.status_code} with what d3serve never says, so the URL is another "
        f"server's, or something stands before it: {text}",
        details=_details(response),
    )


def _details(response: httpx.Response) -> dict[str, Any]:
    return {"status": response.status_code, "request_id": response.headers.get("x-request-id")}
