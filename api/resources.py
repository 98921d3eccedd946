"""How a job, a model and the queue look on the wire."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from starlette.responses import Response

from d3serve.api import bounds
from d3serve.media.files import MAX_FILES, split_state
from d3serve.media.sizes import (
    MAX_FRAME_PIXELS,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_SECONDS,
    MAX_VIDEO_BYTES,
    MAX_VIDEO_TOKENS,
)
from d3serve.schemas import ModelInfo
from d3serve.schemas.questions import LIMITS
from d3serve.settings import Settings
from d3serve.store.encode import to_json
from d3serve.store.records import JobRecord, QueueStats, RecordPage, WorkerInfo

POLL_AFTER_S: Final = 1
RELEASED: Final = "2026-11-29"  # the stock SDK insists on a date; checkpoints do not carry one


class JSON(Response):
    """A JSON response, text as it is, refusing numbers that are no JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Bytes stay as they are: they are JSON already."""
        return content if isinstance(content, bytes) else json_text(content)


def json_text(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return to_json(value).encode()


def job_path(job_id: str) -> str:
    """Where a job is polled; relative, so that it holds behind any proxy."""
    return f"/v1/jobs/{job_id}"


def job_resource(job: JobRecord) -> dict[str, Any]:
    """The job as a client sees it, without its result: a `JobResource`, of which a test holds it."""
    path = job_path(job.id)
    told = {
        "id": job.id,
        "object": "decision.job",
        "status": job.status,
        "done": job.done,
        "attempt": job.attempt,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "expires_at": job.expires_at,
        "request": {**job.request, "lane": job.lane, "priority": job.priority},
        "queue": vars(job.queue) if job.queue else None,
        "progress": vars(job.progress),
        "error": job.error.model_dump(exclude_none=True) if job.error else None,
        "metadata": job.metadata,
        "urls": {"self": path, **{name: f"{path}/{name}" for name in ("result", "events", "cancel")}},
    }
    return {name: value for name, value in told.items() if value is not None}


def timing(job: JobRecord) -> dict[str, str]:
    """The header that says where a job's time went, once it has run; the edge adds the request's own `total`.

    `queue` is from its submission to its last start, `turn` from there to its end, and `pass` the time of the
    passes in which the engine read its state and its questions. These are rows of the same packed passes, so there is
    no time at which the one ends and the other begins, and no honest way to report them apart.
    """
    if job.started_at is None or job.finished_at is None:
        return {}
    spans = {"queue": job.started_at - job.created_at, "turn": job.finished_at - job.started_at}
    told = [f"{name};dur={seconds * 1000:.0f}" for name, seconds in spans.items()]
    told += [f"pass;dur={job.pass_ms:.1f}"] if job.pass_ms is not None else []
    return {"Server-Timing": ", ".join(told)}


def job_response(
    job: JobRecord,
    *,
    status: int = 200,
    result: bytes | None = None,
    asked: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSON:
    """The job as a response; `result` is the text that the worker committed, passed on byte for byte.

    So is `asked`, which `asked_text` makes of the texts that the job was sent with.
    """
    text = json_text(job_resource(job))
    if result is not None:
        text = text[:-1] + b',"result":' + result + b"}"
    if asked is not None:
        text = text[:-1] + b',"asked":' + asked + b"}"
    poll = {} if job.done else {"Retry-After": str(POLL_AFTER_S), "retry-after-ms": str(POLL_AFTER_S * 1000)}
    return JSON(text, status, {**poll, **timing(job), **(headers or {})})


def asked_text(job: JobRecord, stored: str, questions: str) -> bytes:
    """State and questions as they were sent; images and videos by kind, size and SHA-256."""
    state, files = split_state(stored)
    text = json_text(state[1:]) if state.startswith("=") else state.encode()
    shown = [{"type": file.kind, "sha256": file.digest, "bytes": len(file.data())} for file in files]
    head = json_text({"model": job.request["model"]})[:-1]
    return b"".join(
        (head, b',"state":', text, b',"questions":', questions.encode(), b',"media":', json_text(shown), b"}")
    )


def not_modified(response: JSON, if_none_match: str | None) -> Response:
    """`response` with its ETag, or 304 if the client has that version already."""
    tag = f'"{hashlib.sha256(response.body).hexdigest()[:32]}"'
    response.headers["ETag"] = tag
    response.headers["Cache-Control"] = "private, no-cache"  # to be kept by its client, and asked for again
    known = [one.strip().removeprefix("W/") for one in (if_none_match or "").split(",")]
    if tag not in known:
        return response
    about_no_body = {
        name: value for name, value in response.headers.items() if not name.startswith("content-")
    }
    return Response(status_code=304, headers=about_no_body)


def jobs_page(page: RecordPage) -> dict[str, Any]:
    """A page of jobs, newest first; `cursor` leads on."""
    return {
        "object": "list",
        "data": [job_resource(job) for job in page.jobs],
        "has_more": page.cursor is not None,
        "cursor": page.cursor,
    }


def models_resource(models: list[ModelInfo], settings: Settings) -> dict[str, Any]:
    """One body for three clients: `data` for OpenAI's, `models` for the stock SDK, limits for people."""
    return {
        "object": "list",
        "data": [
            {"id": model.name, "object": "model", "created": 0, "owned_by": model.name.partition("/")[0]}
            for model in models
        ],
        "models": [_model(model, settings) for model in models],
    }


def _model(model: ModelInfo, settings: Settings) -> dict[str, Any]:
    return {
        "name": model.name,
        "description": f"{model.full_name}, {model.attention_mode}, {model.dtype} on {model.device}",
        "release_date": RELEASED,
        "revision": model.revision,
        "identity": model.identity,
        "weights": model.weights or model.dtype,
        "aliases": list(settings.model_alias),
        "modalities": list(model.modalities),
        "limits": {
            "tokens_per_question": min(model.max_length, settings.max_interactive_tokens),
            "tokens_per_question_offline": min(model.max_length, settings.max_offline_tokens),
            "questions_per_job": bounds.MAX_QUESTIONS,
            **LIMITS,
            "body_bytes": settings.max_body_bytes,
            "media_per_job": MAX_FILES,
            "image_bytes": MAX_IMAGE_BYTES,
            "image_pixels": MAX_IMAGE_PIXELS,
            "video_bytes": MAX_VIDEO_BYTES,
            "video_frame_pixels": MAX_FRAME_PIXELS,
            "video_seconds": MAX_SECONDS,
            "video_tokens_per_job": MAX_VIDEO_TOKENS,
        },
    }


def queue_resource(stats: QueueStats) -> dict[str, Any]:
    """Depth, age and speed, by lane."""
    return {"object": "decision.queue", **asdict(stats)}


def workers_resource(workers: Sequence[WorkerInfo], running: Mapping[str, int]) -> dict[str, Any]:
    """Each worker with the number of jobs that it runs."""
    return {
        "object": "list",
        "data": [
            {
                "id": worker.id,
                "object": "decision.worker",
                "host": worker.host,
                "pid": worker.pid,
                "lanes": worker.lanes,
                "load": worker.load,
                "error": worker.error,
                "model": worker.model.model_dump() if worker.model else None,
                "running_jobs": running.get(worker.id, 0),
                "tokens_per_s": worker.tokens_per_s,
                "cached_states": worker.cached_states,
                "cached_bytes": worker.cached_bytes,
                "cache_size_bytes": worker.cache_size_bytes,
                "memory_bytes": worker.memory_bytes,
                "memory_total_bytes": worker.memory_total_bytes,
                "peak_memory_bytes": worker.peak_memory_bytes,
            }
            for worker in workers
        ],
    }
