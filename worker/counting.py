"""A thread beside the turns that counts tokens for those who ask before they send a job."""

import threading
import time
from contextlib import closing
from typing import Final

import structlog

from d3serve.errors import D3ServeError, InternalError, StorageUnavailable
from d3serve.schemas import JobError
from d3serve.schemas.counting import Count, CountRequest, QuestionCount
from d3serve.settings import Settings
from d3serve.store.counting import CountQueue
from d3serve.store.turns import ClaimedJob
from d3serve.tracing import telling
from d3serve.worker.engines import Engine, Prepared
from d3serve.worker.preparing import Preparer

AWAY_S: Final = 1.0

log = structlog.get_logger(__name__)


class Counter(threading.Thread):
    """Counts one request after the other, with what would prepare it as a job; never ends a turn, or the process."""

    def __init__(self, queue: CountQueue, engine: Engine, settings: Settings) -> None:
        super().__init__(name="d3serve-counter", daemon=True)
        self._queue, self._engine = queue, engine
        self._preparer = Preparer(engine, settings)
        self._halt = threading.Event()

    def stop(self) -> None:
        """Take no more."""
        self._halt.set()

    def run(self) -> None:
        """Count until `stop`; a Redis that is away is waited for."""
        with closing(self._preparer):
            self._run()

    def _run(self) -> None:
        while not self._halt.is_set():
            try:
                taken = self._queue.take(self._engine.info.revision or "")
                if taken is not None:
                    request_id, request = taken
                    with telling("count", request.traceparent or None, {}, kind="consumer") as told:
                        found = self.count(request)
                        told.attributes["d3serve.tokens"] = found.total_tokens or 0
                    self._queue.answer(request_id, found)
            except StorageUnavailable:
                time.sleep(AWAY_S)
            except Exception as error:  # a thread's edge: without it nothing would be counted any more
                log.error("count.failed", exc_info=error)

    def count(self, request: CountRequest) -> Count:
        """What the request would read as a job, and why each part of it would be refused that would."""
        job, refused = _as_job(request), list[Exception]()
        for _, opened in self._preparer.open([job], lambda _job, error: refused.append(error)):
            try:
                prepared = self._preparer.tokenize(job, opened)
            except Exception as error:  # of all questions, or of the state
                refused.append(error)
            else:
                whole = self._preparer.too_large(job, prepared)
                return self._told(prepared, [*prepared.refused.values(), *([whole] if whole else [])])
        return Count(model=self._engine.info.full_name, refused=[_told_error(error) for error in refused])

    def _told(self, prepared: Prepared, refused: list[Exception]) -> Count:
        shared, prompts = prepared.state_tokens, prepared.prompt_tokens
        return Count(
            model=self._engine.info.full_name,
            state_tokens=shared,
            total_tokens=prepared.tokens,
            input_tokens=sum(prompts.values()),
            questions={
                name: QuestionCount(tokens=tokens - shared, prompt_tokens=tokens)
                for name, tokens in prompts.items()
            },
            refused=[_told_error(error) for error in refused],
        )


def _as_job(request: CountRequest) -> ClaimedJob:
    """The job that the request would be, as a turn would have claimed it; each refusal of a question is wanted."""
    return ClaimedJob(
        id="", group="", tenant=request.tenant, model=request.model, attempt=0, state=request.state,
        questions=request.questions, partial=True, asked_lane=request.lane, created_ms=0,
    )  # fmt: skip


def _told_error(error: Exception) -> JobError:
    """A refusal as a job's error tells it; what else went wrong is ours, and for the log alone."""
    if not isinstance(error, D3ServeError):
        log.error("count.failed", exc_info=error)
        error = InternalError("this request could not be counted")
    return JobError(code=error.code, message=error.message, retryable=error.retryable, field=error.field)
