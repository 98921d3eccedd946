"""One turn: claim state groups, tokenize, decide, commit each job, take late joiners, free the lease."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from d3serve.celery_app import WakeSender
from d3serve.errors import D3ServeError, DeviceError, InternalError, StateLost, StorageUnavailable
from d3serve.schemas import Answer, DecisionResponse, ErrorAnswer, JobError, Question, QuestionError, Usage
from d3serve.settings import Settings
from d3serve.store.encode import decode_questions, decode_state
from d3serve.store.turns import ClaimedJob, Turn, TurnStore
from d3serve.worker.engines import Decided, Engine, Prepared
from d3serve.worker.grouping import plan_passes, question_tokens
from d3serve.worker.lease import LeaseKeeper

MAX_ROUNDS = 8  # late joiners may extend a turn so often; then other states have their chance
QUESTION_FIELD = "questions."

log = structlog.get_logger(__name__)


@dataclass
class Work:
    """One claimed job on its way through a turn; `refused` holds questions that cannot be answered."""

    job: ClaimedJob
    prepared: Prepared
    questions: dict[str, Question]
    refused: dict[str, ErrorAnswer] = field(default_factory=dict)


@dataclass
class TurnReport:
    """What a turn did; `work_tokens` counts each job's state and questions, read or not."""

    jobs: int = 0
    work_tokens: int = 0
    seconds: float = 0.0


class TurnRunner:
    """Runs turns, one at a time, on one engine."""

    def __init__(self, store: TurnStore, engine: Engine, settings: Settings, send_wake: WakeSender) -> None:
        self._store = store
        self._engine = engine
        self._settings = settings
        self._send_wake = send_wake

    def run(self) -> TurnReport:
        """Claim and finish one turn; an empty report when there was no work.

        Raises:
            DeviceError: the accelerator is in an unknown state: the process must be replaced.
            StorageUnavailable: Redis is away; what was not committed will run again.
        """
        turn = self._store.claim(os.getpid())
        self._wake(turn.wakes)
        report = TurnReport()
        if not turn.jobs:
            return report
        began = time.monotonic()
        warm: set[str] = set()
        try:
            with LeaseKeeper(self._store, turn.lease, self._settings.lease_s) as keeper:
                self._rounds(turn, keeper, report, warm)
        except Exception:
            self._free(turn, "lost", warm)  # the next attempt runs each suspect alone
            raise
        # A process told to end leaves here with SystemExit and keeps the lease: only the main process
        # knows whether it stops or was stuck, and frees it accordingly.
        self._free(turn, "back", warm)
        report.seconds = time.monotonic() - began
        return report

    def _rounds(self, turn: Turn, keeper: LeaseKeeper, report: TurnReport, warm: set[str]) -> None:
        jobs = turn.jobs
        for _ in range(MAX_ROUNDS):
            works = self._prepare_all(turn, jobs)
            self._decide_all(turn, works, keeper, report)
            cached = frozenset(self._engine.cached_state_keys())
            warm.update(work.job.group for work in works if work.prepared.state_key in cached)
            jobs = [] if keeper.lost else self._store.more(turn.lease)
            if not jobs:
                return

    def _free(self, turn: Turn, mode: Literal["back", "lost"], warm: set[str]) -> None:
        try:
            freed = self._store.free(turn.lease, mode, sorted(warm))
        except StorageUnavailable:
            log.warning("lease.left", lease=turn.lease)  # it runs out by itself
            return
        self._wake(freed.wakes)

    def _wake(self, lanes: Sequence[Any]) -> None:
        for lane in lanes:
            self._send_wake(lane)

    # --- preparing ---------------------------------------------------------------------------------

    def _prepare_all(self, turn: Turn, jobs: Sequence[ClaimedJob]) -> list[Work]:
        states: dict[str, Any] = {}
        works = []
        for job in jobs:
            try:
                if job.state is None:
                    raise StateLost("the state of this job is no longer stored; send the request again")
                if job.group not in states:
                    states[job.group] = decode_state(job.state)
                works.append(self._prepare(job, states[job.group]))
            except Exception as error:  # a job's fault must not fail its neighbours
                self._fail(turn, job, error)
        return works

    def _prepare(self, job: ClaimedJob, state: Any) -> Work:
        """Tokenize; where the client asked for partial answers, set aside the questions that are refused."""
        questions, refused = dict(decode_questions(job.questions)), dict[str, ErrorAnswer]()
        interactive = job.asked_lane == "interactive"
        limit = self._settings.max_interactive_tokens if interactive else self._settings.max_offline_tokens
        while True:
            try:
                prepared = self._engine.prepare(state, questions, salt=job.tenant, max_tokens=limit)
            except D3ServeError as error:
                name = (error.field or "").removeprefix(QUESTION_FIELD)
                if not job.partial or name not in questions or len(questions) == 1:
                    raise
                del questions[name]
                refused[name] = ErrorAnswer(error=QuestionError(code=error.code, message=error.message))
            else:
                return Work(job, prepared, questions, refused)

    # --- deciding ----------------------------------------------------------------------------------

    def _decide_all(self, turn: Turn, works: Sequence[Work], keeper: LeaseKeeper, report: TurnReport) -> None:
        passes = plan_passes(
            works,
            frozenset(self._engine.cached_state_keys()),
            max_tokens=self._settings.max_batch_tokens,
            max_questions=self._settings.max_batch_questions,
        )
        for chosen in passes:
            wanted = self._store.progress(turn.lease, "deciding", [work.job.id for work in chosen])
            if keeper.lost:
                return
            live = [work for work in chosen if work.job.id in wanted]
            if live:
                self._decide(turn, live, report)

    def _decide(self, turn: Turn, works: Sequence[Work], report: TurnReport) -> None:
        """Run one pass; where it fails, halve it until the job at fault is alone, and fail only that."""
        began = time.perf_counter()
        try:
            decided = self._engine.decide([work.prepared for work in works])
        except DeviceError:
            raise
        except Exception as error:
            if len(works) == 1:
                self._fail(turn, works[0].job, error)
                return
            log.warning("pass.halved", jobs=len(works), error=type(error).__name__)
            middle = len(works) // 2
            self._decide(turn, works[:middle], report)
            self._decide(turn, works[middle:], report)
            return
        pass_ms = (time.perf_counter() - began) * 1000
        for work, answer in zip(works, decided, strict=True):
            self._succeed(turn, work, answer, pass_ms)
            report.jobs += 1
            report.work_tokens += work.prepared.state_tokens + question_tokens(work.prepared)

    # --- committing --------------------------------------------------------------------------------

    def _succeed(self, turn: Turn, work: Work, decided: Decided, pass_ms: float) -> None:
        order = decode_questions(work.job.questions)
        answers: dict[str, Answer] = {name: decided.answers.get(name) or work.refused[name] for name in order}
        response = DecisionResponse(model=self._engine.info.full_name, answers=answers, usage=decided.usage)
        identity = self._engine.info.identity
        accepted = self._store.succeed(turn.lease, work.job.id, response, pass_ms, identity)
        self._log(work.job, "succeeded" if accepted else "refused", work.prepared, decided.usage)

    def _fail(self, turn: Turn, job: ClaimedJob, error: Exception) -> None:
        if not isinstance(error, D3ServeError):
            log.error("job.crashed", job_id=job.id, exc_info=error)
            what = "the worker ran out of memory" if isinstance(error, MemoryError) else "the worker failed"
            error = InternalError(f"{what} on this job")
        told = JobError(code=error.code, message=error.message, retryable=error.retryable, field=error.field)
        accepted = self._store.fail(turn.lease, job.id, told)
        log.info("job.done", job_id=job.id, status="failed" if accepted else "refused", code=error.code,
                 attempt=job.attempt)  # fmt: skip

    def _log(self, job: ClaimedJob, status: str, prepared: Prepared, usage: Usage) -> None:
        log.info(
            "job.done", job_id=job.id, status=status, state_key=prepared.state_key[:16], attempt=job.attempt,
            questions=usage.questions, state_tokens=usage.state_tokens, state_cached=usage.state_cached,
        )  # fmt: skip
