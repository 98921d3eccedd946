"""Files and batches as OpenAI's clients send and read them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from d3serve.schemas import Metadata
from d3serve.schemas.questions import Wire
from d3serve.store.batches import WINDOW_S, BatchRecord, BatchStatus
from d3serve.store.files import FileRecord

LEAST_TTL_S, MOST_TTL_S = 3_600, 30 * 86_400  # OpenAI's
TTLSeconds = Annotated[int, Field(ge=LEAST_TTL_S, le=MOST_TTL_S)]


class ExpiresAfter(Wire):
    """How long a file is kept, from its creation."""

    anchor: Literal["created_at"]
    seconds: TTLSeconds


class BatchRequest(Wire):
    """A batch to be made of a file."""

    input_file_id: str = Field(min_length=1, max_length=64)
    endpoint: Literal["/v1/decisions", "/v1/systemone"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class FileResource(BaseModel):
    """A file; times are seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(BaseModel):
    """A page of files; the last one's id as `after` continues it."""

    object: Literal["list"]
    data: list[FileResource]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """The file is erased."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchFinding(BaseModel):
    """What is wrong with an input, at which line."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchFindings(BaseModel):
    """Up to a hundred of them."""

    object: Literal["list"]
    data: list[BatchFinding]


class RequestCounts(BaseModel):
    """How many requests there are, and how many have an outcome; 0 until the input has been read."""

    total: int
    completed: int
    failed: int


class BatchResource(BaseModel):
    """A batch; times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    errors: BatchFindings | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    usage: dict[str, Any] | None = Field(description="Input tokens of what succeeded; OpenAI's fields.")


class BatchList(BaseModel):
    """A page of batches, newest first; the last one's id as `after` continues it."""

    object: Literal["list"]
    data: list[BatchResource]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_resource(file: FileRecord) -> dict[str, Any]:
    """The file as a client sees it."""
    return {
        "id": file.id, "object": "file", "bytes": file.bytes, "created_at": int(file.created_at),
        "expires_at": int(file.expires_at), "filename": file.name, "purpose": file.purpose, "status": "processed",
    }  # fmt: skip


_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def batch_resource(batch: BatchRecord) -> dict[str, Any]:
    """The batch as a client sees it."""
    counts, times = batch.counts, {f"{name}_at": batch.times.get(f"{name}_at") for name in _TIMES}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file,
        "completion_window": f"{WINDOW_S // 3600}h",
        "status": batch.status,
        "output_file_id": batch.files.get("output"),
        "error_file_id": batch.files.get("error"),
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        **{name: None if at is None else int(at) for name, at in times.items()},
        "request_counts": {
            "total": batch.total,
            "completed": counts["completed"],
            "failed": counts["failed"],
        },
        "metadata": batch.metadata,
        "usage": {
            "input_tokens": counts["input_tokens"],
            "input_tokens_details": {"cached_tokens": counts["cached_tokens"]},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["input_tokens"],
        }
        if batch.total
        else None,
    }


def page_of(rows: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page as OpenAI's clients turn it."""
    first, last = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
    return {"object": "list", "data": rows, "first_id": first, "last_id": last, "has_more": has_more}
