"""The one error body, which every client family reads: RFC 9457 problem details plus OpenAI's `error` object.

`detail` is a string, since the stock SDK prints nothing else of a problem; `error` repeats it for the OpenAI
client, with `code` and `field` for others. No part echoes the input whole: ten problems at most, and each
text is cut, so that a body of 4 KB cannot come back as megabytes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel
from starlette.responses import Response

from d3serve.errors import D3ServeError, error_class
from d3serve.schemas import JobError

MAX_PROBLEMS: Final = 10
MAX_TEXT_CHARS: Final = 400
MAX_BODY_BYTES: Final = 16 * 2**10
EXTENSIONS: Final = ("job_id", "expired_at")  # details that a client may act on
DEFAULT_RETRY_AFTER_S: Final = 1.0
MAX_RETRY_AFTER_S: Final = 60.0  # the Python SDK sleeps as long as it is told, an hour if so

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
    "conflict_error", "rate_limit_error", "server_error",
]  # fmt: skip
_ERROR_TYPES: Final[Mapping[int, ErrorType]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "not_found_error",
    429: "rate_limit_error",
}


class ProblemItem(BaseModel):
    """One thing that is wrong: a JSON pointer into the request, a code, a sentence."""

    pointer: str
    code: str
    detail: str


class ProblemError(BaseModel):
    """The same error as OpenAI's clients expect it."""

    message: str
    type: ErrorType
    param: str | None
    code: str
    field: str | None


class Problem(BaseModel):
    """The body of every response that is an error."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str
    errors: list[ProblemItem] = []
    error: ProblemError
    job_id: str | None = None
    expired_at: float | None = None


def problem_response(
    error: D3ServeError, *, instance: str, request_id: str, headers: Mapping[str, str] | None = None
) -> Response:
    """`error` as an HTTP response: its status, the one body, and Retry-After where waiting can help."""
    return problem(
        error.http_status,
        error.code,
        error.message,
        instance=instance,
        request_id=request_id,
        field=error.field,
        errors=error.details.get("errors", ()),
        extra={name: error.details[name] for name in EXTENSIONS if name in error.details},
        headers={**_headers(error), **(headers or {})},
    )


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    instance: str,
    request_id: str,
    field: str | None = None,
    errors: Sequence[Mapping[str, str]] = (),
    extra: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The one error body, at most 16 KB of it."""
    detail, field = clipped(detail), clipped(field) if field else None
    body: dict[str, Any] = {
        "type": f"urn:d3serve:error:{code}",
        "title": code.replace("_", " ").capitalize(),
        "status": status,
        "detail": detail,
        "instance": clipped(instance),
        "code": code,
        "request_id": request_id,
        "errors": [{key: clipped(text) for key, text in one.items()} for one in errors[:MAX_PROBLEMS]],
        "error": {
            "message": detail,
            "type": _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
            "param": field,
            "code": code,
            "field": field,
        },
    }
    body |= extra or {}
    content = json.dumps(body, ensure_ascii=False).encode()
    if len(content) > MAX_BODY_BYTES:  # text of four bytes a character: say the first thing only
        content = json.dumps({**body, "errors": []}, ensure_ascii=False).encode()
    return Response(content, status, headers, media_type="application/problem+json")


def clipped(text: str) -> str:
    """At most 400 characters of `text`, the end replaced by an ellipsis."""
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"


def _headers(error: D3ServeError) -> dict[str, str]:
    """What an error says in headers: how to call, when to come back, where the job is."""
    headers: dict[str, str] = {}
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retryable:  # both forms, 0 to 60 s
        wait_s = float(error.details.get("retry_after_s", DEFAULT_RETRY_AFTER_S))
        wait_s = min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)
        headers |= {"Retry-After": str(math.ceil(wait_s)), "retry-after-ms": f"{wait_s * 1000:.0f}"}
    if "job_id" in error.details:  # for a client that gives up on waiting and wants to poll
        headers["Location"] = f"/v1/jobs/{error.details['job_id']}"
    return headers


def error_of(job_error: JobError) -> D3ServeError:
    """The error by which a job failed, as the error to answer with when its result is asked for."""
    return error_class(job_error.code)(job_error.message, field=job_error.field)
