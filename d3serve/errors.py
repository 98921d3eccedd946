"""Every error that d3serve raises on purpose, as one tree.

    D3ServeError
    ├── RequestError                 400 bad_request; below it all that the client can mend: 4xx, never retried
    │   ├── InvalidJSON              400 invalid_json
    │   │   └── DuplicateKey         400 duplicate_key
    │   ├── Unauthorized             401 unauthorized
    │   ├── Forbidden                403 forbidden
    │   ├── ModelNotFound            404 model_not_found
    │   ├── JobNotFound              404 job_not_found
    │   ├── NotFound                 404 not_found
    │   ├── JobNotFinished           409 job_not_finished
    │   ├── AlreadySucceeded         409 already_succeeded
    │   ├── JobExpired               410 result_expired
    │   ├── EventErased              410 event_erased
    │   ├── RequestErased            410 request_erased
    │   ├── BodyTooLarge             413 body_too_large
    │   ├── UnsupportedMediaType     415 unsupported_media_type
    │   ├── UnsupportedEncoding      415 unsupported_encoding
    │   ├── InvalidRequest           422 invalid_request
    │   │   ├── InvalidQuestion      422 invalid_question
    │   │   ├── TooManyQuestions     422 too_many_questions
    │   │   ├── TooManyOptions       422 too_many_options
    │   │   ├── MaxTokensExceeded    422 max_tokens_exceeded
    │   │   ├── UnsupportedModality  422 unsupported_modality
    │   │   └── InvalidMedia         422 invalid_media
    │   ├── IdempotencyKeyReused     422 idempotency_key_reused
    │   ├── RateLimited              429 rate_limited    (retryable)
    │   ├── QueueFull                429 queue_full      (retryable)
    │   └── QuotaExceeded            429 quota_exceeded  (retryable)
    ├── ServiceError                 the server's side: 5xx
    │   ├── InternalError            500 internal_error
    │   ├── InvalidModelOutput       500 invalid_model_output
    │   ├── NoWorker                 503 no_worker            (retryable)
    │   ├── Overloaded               503 overloaded           (retryable)
    │   ├── ShuttingDown             503 shutting_down        (retryable)
    │   ├── StorageUnavailable       503 storage_unavailable  (retryable)
    │   ├── StillRunning             504 still_running        (retryable)
    │   └── CallExpired              504 call_expired         (retryable)
    ├── JobFailure                   how a job can end as `failed`
    │   ├── MaxAttempts              500 max_attempts
    │   ├── JobOverdue               410 job_expired
    │   ├── StateLost                500 state_lost           (retryable)
    │   ├── DeviceError              500 device_error
    │   └── OutOfDeviceMemory        500 out_of_device_memory
    └── StartupError                 a process refuses to start; never crosses HTTP
        ├── InvalidSettings
        ├── InvalidCheckpoint
        └── BrokerUnavailable

`code`, `http_status` and `retryable` are class attributes: one place decides what a client sees. Each code is one
class's, so whoever reads a code can raise what was raised.
"""

from collections.abc import Iterator
from typing import Any, ClassVar


class D3ServeError(Exception):
    """The root: catch this to catch everything that d3serve raises on purpose."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, field: str | None = None, details: dict[str, Any] | None = None
    ) -> None:
        """Keep `message` (safe to show to a client), the `field` at fault and machine-readable `details`."""
        super().__init__(message)
        self.message = message
        self.field = field
        self.details = details or {}


class RequestError(D3ServeError):
    """The request is at fault, here in its very form; sending it again unchanged cannot succeed."""

    code = "bad_request"
    http_status = 400


class InvalidJSON(RequestError):
    """The body is not the strict JSON that we accept."""

    code = "invalid_json"


class DuplicateKey(InvalidJSON):
    """An object of the body holds one key twice, so a value would be lost silently."""

    code = "duplicate_key"


class Unauthorized(RequestError):
    """No API key, or one that nobody issued."""

    code = "unauthorized"
    http_status = 401


class Forbidden(RequestError):
    """The API key is known but not allowed to do this."""

    code = "forbidden"
    http_status = 403


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    code = "model_not_found"
    http_status = 404


class JobNotFound(RequestError):
    """No job of this id was ever accepted from this caller."""

    code = "job_not_found"
    http_status = 404


class NotFound(RequestError):
    """No such webhook endpoint or delivery, or one of another caller."""

    code = "not_found"
    http_status = 404


class JobNotFinished(RequestError):
    """The job has no result yet, or its state forbids what was asked."""

    code = "job_not_finished"
    http_status = 409


class AlreadySucceeded(RequestError):
    """A job that has its answers was to be run again; only another job can ask anew."""

    code = "already_succeeded"
    http_status = 409


class JobExpired(RequestError):
    """The job existed, and its retention has ended."""

    code = "result_expired"
    http_status = 410


class EventErased(RequestError):
    """A webhook event's text is no longer kept, so it cannot be sent again."""

    code = "event_erased"
    http_status = 410


class RequestErased(RequestError):
    """What a job was asked is no longer kept, although the job is."""

    code = "request_erased"
    http_status = 410


class BodyTooLarge(RequestError):
    """The body, decoded, is larger than the limit."""

    code = "body_too_large"
    http_status = 413


class UnsupportedMediaType(RequestError):
    """The body's Content-Type is not one that this route reads."""

    code = "unsupported_media_type"
    http_status = 415


class UnsupportedEncoding(RequestError):
    """The body's Content-Encoding is not one that we decode."""

    code = "unsupported_encoding"
    http_status = 415


class InvalidRequest(RequestError):
    """A field of the request has a value that we refuse."""

    code = "invalid_request"
    http_status = 422


class InvalidQuestion(InvalidRequest):
    """A question is malformed; `field` names it."""

    code = "invalid_question"


class TooManyQuestions(InvalidRequest):
    """More questions than one job may hold."""

    code = "too_many_questions"


class TooManyOptions(InvalidRequest):
    """More options than the model has codes, or more levels than a score may have."""

    code = "too_many_options"


class MaxTokensExceeded(InvalidRequest):
    """A prompt is longer than the model is allowed to read; nothing was truncated."""

    code = "max_tokens_exceeded"


class UnsupportedModality(InvalidRequest):
    """Images, videos or audio sent to a model or a route that reads text only."""

    code = "unsupported_modality"


class InvalidMedia(InvalidRequest):
    """A file is no image or video that can be read, or one past a limit."""

    code = "invalid_media"


class IdempotencyKeyReused(RequestError):
    """The same Idempotency-Key came with a different body."""

    code = "idempotency_key_reused"
    http_status = 422


class RateLimited(RequestError):
    """The caller sent more requests than its key allows."""

    code = "rate_limited"
    http_status = 429
    retryable = True


class QueueFull(RequestError):
    """The queue holds as many jobs, or bytes, as it may."""

    code = "queue_full"
    http_status = 429
    retryable = True


class QuotaExceeded(RequestError):
    """The tenant has as many jobs waiting, or bytes kept, as one may; `details` names limit and use."""

    code = "quota_exceeded"
    http_status = 429
    retryable = True


class ServiceError(D3ServeError):
    """The service is at fault or not ready."""

    code = "service_error"


class InternalError(ServiceError):
    """Something broke that we did not foresee."""

    code = "internal_error"


class InvalidModelOutput(ServiceError):
    """The model produced numbers that are no probabilities."""

    code = "invalid_model_output"


class NoWorker(ServiceError):
    """No live worker serves the model."""

    code = "no_worker"
    http_status = 503
    retryable = True


class Overloaded(ServiceError):
    """A process or its host has as much in hand as it can hold: bodies, connections, file descriptors, decoding."""

    code = "overloaded"
    http_status = 503
    retryable = True


class ShuttingDown(ServiceError):
    """The process is stopping and takes no new work."""

    code = "shutting_down"
    http_status = 503
    retryable = True


class StorageUnavailable(ServiceError):
    """Redis is unreachable, or full."""

    code = "storage_unavailable"
    http_status = 503
    retryable = True


class StillRunning(ServiceError):
    """A synchronous call outlasted its wait; the job goes on."""

    code = "still_running"
    http_status = 504
    retryable = True


class CallExpired(ServiceError):
    """The job of a synchronous call ended without an answer: in no time that it was given, or erased by its owner."""

    code = "call_expired"
    http_status = 504
    retryable = True


class JobFailure(D3ServeError):
    """A job ended as `failed` through no fault of its request."""

    code = "job_failed"


class MaxAttempts(JobFailure):
    """Every attempt at the job ended with the loss of its worker."""

    code = "max_attempts"


class JobOverdue(JobFailure):
    """The job ended as `expired`: it did not start, or did not end, within the time that its client gave it."""

    code = "job_expired"
    http_status = 410


class StateLost(JobFailure):
    """The job's state is no longer where it was stored; sending the same request again stores it again."""

    code = "state_lost"
    retryable = True


class DeviceError(JobFailure):
    """The accelerator reported an error; the worker restarts."""

    code = "device_error"


class OutOfDeviceMemory(JobFailure):
    """The job does not fit the accelerator, even alone; the message holds the sizes."""

    code = "out_of_device_memory"


class StartupError(D3ServeError):
    """A process cannot start as configured; it exits with this message and no traceback."""

    code = "startup_error"


class InvalidSettings(StartupError):
    """A setting is unknown or has a value that we refuse."""

    code = "invalid_settings"


class InvalidCheckpoint(StartupError):
    """A checkpoint is incomplete, inconsistent or of a kind that we do not know."""

    code = "invalid_checkpoint"


class BrokerUnavailable(StartupError):
    """No Redis-protocol server can be reached or started."""

    code = "broker_unavailable"


def error_class(code: str) -> type[D3ServeError]:
    """The class of the tree that bears `code`; JobFailure for one unknown to us."""
    return _BY_CODE.get(code, JobFailure)


def _tree(root: type[D3ServeError]) -> Iterator[type[D3ServeError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_BY_CODE = {kind.code: kind for kind in _tree(D3ServeError)}
