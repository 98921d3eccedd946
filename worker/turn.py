"""One turn: claim state groups, tokenize, decide, commit each job, take late joiners, free the lease."""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

import structlog

from d3serve.errors import (
    D3ServeError,
    DeviceError,
    InternalError,
    OutOfDeviceMemory,
    StorageUnavailable,
)
from d3serve.schemas import DecisionResponse, JobError, Lane, Usage
from d3serve.schemas.questions import Answer, ErrorAnswer, QuestionError
from d3serve.settings import Settings
from d3serve.store.encode import decode_questions
from d3serve.store.records import Stage
from d3serve.store.turns import ClaimedJob, FreeMode, Success, Turn, TurnStore
from d3serve.wake.celery_app import TURN_LIMIT_S, WakeSender
from d3serve.worker import traces
from d3serve.worker.ahead import Ahead
from d3serve.worker.engines import Decided, Engine
from d3serve.worker.lease import LeaseKeeper
from d3serve.worker.memory import memory_of
from d3serve.worker.preparing import OpenTurn, Preparer, Work, is_long
from d3serve.worker.shown import Opened, OpenState, as_they_are_ready
from d3serve.worker.stopping import Grace
from d3serve.worker.watch import Busy, PassWatch
from d3serve.worker.yields import LOOK_EVERY_S, OutOfTime, PassEnded, Yields

MAX_ROUNDS = 8  # late joiners may extend a turn so often; then other states have their chance

log = structlog.get_logger(__name__)


Found = tuple[Work, Decided | Exception, float]  # about a job, in passes of so many seconds


@dataclass
class TurnReport:
    """What a turn did; `work_tokens` counts each job's state and questions, read or not.

    `cached_states` is how many states the engine held when it was last asked, `cached_bytes` their memory.
    `memory` is what `memory_of` told after it. Where nobody knows the worker it did nothing: `known` is False.
    """

    known: bool = True
    jobs: int = 0
    work_tokens: int = 0
    cached_states: int = 0
    cached_bytes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class TurnRunner:
    """Runs turns, one at a time, on one engine."""

    def __init__(self, store: TurnStore, engine: Engine, settings: Settings, send_wake: WakeSender) -> None:
        self._store = store
        self._engine = engine
        self._settings = settings
        self.preparer = Preparer(engine, settings)
        self._send_wake = send_wake
        self.busy = Busy()
        self.grace = Grace(settings.stop_grace_s)
        self._ahead = Ahead(self._claim_ahead)
        self._waiting = False  # whether a turn waits while another one passes
        self._suspended = False  # whether a pass of the engine is between two of its steps
        self._yields_until = 0.0

    def run(self) -> TurnReport:
        """Claim and finish one turn; an empty report when there was no work, or no time for any.

        Raises:
            DeviceError: the accelerator is in an unknown state: the process must be replaced.
            StorageUnavailable: Redis is away; what was not committed will run again.
            OutOfTime: the process is to end sooner than the turn would; what was not committed has gone back.
        """
        report, began = TurnReport(), time.monotonic()
        if self.grace.stopping:
            self.leave()
            return report
        self._yields_until = began + TURN_LIMIT_S / 2
        claimed = self._ahead.take()
        turn = claimed.turn if claimed else self._store.claim(os.getpid())
        report.known = turn.known
        try:
            self._run(turn, report, MAX_ROUNDS, claimed)
        except Exception:
            self.leave()
            raise
        report.seconds = time.monotonic() - began
        if report.jobs:
            report.memory = memory_of(self._engine)
        return report

    def leave(self) -> None:
        """Give back what was claimed ahead: no turn follows for now."""
        if claimed := self._ahead.take():
            self._free(claimed.turn, "back", set())

    def _run(self, turn: Turn, report: TurnReport, max_rounds: int, claimed: OpenTurn | None = None) -> None:
        self.wake(turn.wakes)
        if not turn.jobs:
            return
        warm: set[str] = set()
        try:
            with LeaseKeeper(self._store, turn.lease) as keeper:
                self._rounds(claimed or self._open(turn, turn.jobs), keeper, report, warm, max_rounds)
        except Exception as error:
            # The next attempt runs each suspect alone; none is where Redis was away or time ran out, nor, as the store
            # knows, who only waited for another's turn.
            self._free(turn, "back" if isinstance(error, (StorageUnavailable, OutOfTime)) else "lost", warm)
            raise
        # A process told to end leaves here with SystemExit and keeps the lease: only the main process
        # knows whether it stops or was stuck, and frees it accordingly.
        # Beside a suspended pass, what was left did not fit there.
        self._free(turn, "alone" if self._suspended else "back", warm)

    def _rounds(
        self, claimed: OpenTurn, keeper: LeaseKeeper, report: TurnReport, warm: set[str], max_rounds: int
    ) -> None:
        turn = claimed.turn
        for rounds_left in reversed(range(max_rounds)):
            left = len(claimed.opened)
            for ready in as_they_are_ready(claimed.opened):
                left -= len(ready)
                works = self._prepare_all(turn, ready, report, claimed.under_way)
                self._decide_all(turn, works, keeper, report, last=not left)
                cached = frozenset(self._engine.cached_state_keys())
                report.cached_states, report.cached_bytes = len(cached), self._engine.cached_bytes
                warm.update(work.job.group for work in works if work.prepared.state_key in cached)
                if keeper.lost or self.grace.stopping:  # who waits for a file goes back
                    return
            # Late joiners would have what is claimed ahead wait for longer than for one pass.
            goes_on = rounds_left and not (keeper.lost or self.grace.stopping or self._ahead.has_turn())
            jobs = self._store.more(turn.lease) if goes_on else []
            if not jobs:
                return
            claimed = self._open(turn, jobs)

    def _free(self, turn: Turn, mode: FreeMode, warm: set[str]) -> None:
        try:
            freed = self._store.free(turn.lease, mode, sorted(warm), turn.spent)
        except StorageUnavailable:
            log.warning("lease.left", lease=turn.lease)  # it runs out by itself
            return
        self.wake(freed.wakes)

    def wake(self, lanes: Sequence[Lane]) -> None:
        """Tell others of work that they could take."""
        for lane in lanes:
            self._send_wake(lane)

    # --- preparing ---------------------------------------------------------------------------------

    def _claim_ahead(self) -> OpenTurn | None:
        """Claim the next turn and have its short texts tokenized, beside a pass."""
        if self.grace.stopping or not self._store.interactive_waits():
            return None
        turn = self._store.claim(os.getpid(), ahead=True)
        self.wake(turn.wakes)
        turn.wakes.clear()
        if not turn.jobs:
            return None
        try:
            claimed = self._open(turn, turn.jobs)
            for job, state in claimed.opened:
                if state.ready and not is_long(job):
                    claimed.under_way[job.id] = self.preparer.begin(job, state)
            wait(claimed.under_way.values())
        except Exception:
            self._free(turn, "back", set())
            raise
        return claimed

    def _open(self, turn: Turn, jobs: Sequence[ClaimedJob]) -> OpenTurn:
        traces.tell_claimed(jobs)
        return OpenTurn(turn, self.preparer.open(jobs, partial(self._fail, turn)))

    def _prepare_all(
        self, turn: Turn, opened: Sequence[Opened], report: TurnReport, under_way: dict[str, Future[Work]]
    ) -> list[Work]:
        works = []
        # Not before short jobs of the turn itself: who came later would overtake them.
        beside = not any(job.asked_lane == "interactive" and not is_long(job) for job, _ in opened)
        if len(opened) > 1:
            short = [(job, state) for job, state in opened if not (beside and is_long(job))]
            for job, state in short:
                if job.id not in under_way:
                    under_way[job.id] = self.preparer.begin(job, state)
        for job, state in opened:
            try:
                if job.id in under_way:
                    works.append(under_way[job.id].result())
                elif beside and is_long(job):
                    works.append(self._beside_short_work(turn, job, state, report))
                else:
                    works.append(self.preparer.prepare(job, state))
            except (DeviceError, PassEnded):
                raise
            except Exception as error:  # a job's fault must not fail its neighbours
                self._fail(turn, job, error)
        return works

    def _beside_short_work(self, turn: Turn, job: ClaimedJob, state: OpenState, report: TurnReport) -> Work:
        """Tokenize a long text, which takes tenths of a second; short work overtakes it as it would a long pass."""
        if self._suspended or not self._serves_short_work:
            return self.preparer.prepare(job, state)

        def let_overtake() -> bool:
            return self._let_short_work_overtake(turn, "preparing", [job.id], report)

        look = Yields(lambda: True, let_overtake, fits=self.grace.fits)
        prepared = self.preparer.begin(job, state)
        try:
            while not wait([prepared], LOOK_EVERY_S).done:
                look(0.0)
        finally:
            wait([prepared])
        return prepared.result()

    # --- deciding ----------------------------------------------------------------------------------

    def _decide_all(
        self, turn: Turn, works: Sequence[Work], keeper: LeaseKeeper, report: TurnReport, *, last: bool
    ) -> None:
        """Decide a turn's jobs, those that none overtakes first: who waits there would wait longest."""
        overtaken = {True: list[Work](), False: list[Work]()}
        for work in works:
            overtaken[self._may_be_overtaken(work)].append(work)
        last = last and not overtaken[True] and not self._waiting
        for may_be, chosen in ((False, overtaken[False]), (True, overtaken[True])):
            if chosen and not keeper.lost:
                self._decide(turn, chosen, keeper, report, overtaken=may_be, last=last)

    def _decide(
        self,
        turn: Turn,
        works: Sequence[Work],
        keeper: LeaseKeeper,
        report: TurnReport,
        *,
        overtaken: bool,
        last: bool,
    ) -> None:
        """Decide jobs in as many passes as the engine needs, and end each job as soon as it can be.

        The next turn is claimed during the last pass of a turn, where that is a short one: none overtakes it.
        """

        def last_begins(jobs: Sequence[int]) -> None:
            if last:
                self._ahead.begins(self._tokens_to_read([works[number] for number in jobs]))

        def let_overtake(ids: Sequence[str]) -> bool:
            return self._let_short_work_overtake(turn, "deciding", ids, report)

        def ended(jobs: Sequence[int], during: traces.Span) -> None:
            traces.tell_pass([works[number].job for number in jobs], during)

        watch = PassWatch(
            self._store,
            keeper,
            self.grace,
            [work.job.id for work in works],
            between=lambda: self._let_others_overtake(turn, report),
            let_overtake=let_overtake if overtaken else None,
            last_begins=last_begins,
            busy=self.busy,
            ended=ended,
        )
        for finished in self._engine.decisions([work.prepared for work in works], watch):
            if last:
                self._ahead.ends(finished[0].seconds)
            self._end(turn, [(works[number], found, seconds) for number, found, seconds in finished], report)

    def _tokens_to_read(self, works: Sequence[Work]) -> int:
        """Tokens of a pass: of its questions, and of the states that are not cached."""
        cached = frozenset(self._engine.cached_state_keys())
        jobs = [work.prepared for work in works]
        states = {job.state_key: job.state_tokens for job in jobs if job.state_key not in cached}
        return sum(states.values()) + sum(job.tokens - job.state_tokens for job in jobs)

    def _let_others_overtake(self, turn: Turn, report: TurnReport) -> None:
        """Between two passes of a large job, let interactive work that waits have its turn, if it fits one."""
        if not self._waiting and not self.grace.stopping and time.monotonic() < self._yields_until:
            self._run_beside(turn, report, None)

    def _run_beside(self, turn: Turn, report: TurnReport, max_tokens: int | None) -> bool:
        """Run a turn that takes no more than so many tokens, while another waits; whether there was one."""
        before, self._waiting = self._waiting, True
        try:
            other = self._store.claim(os.getpid(), beside=turn.lease, max_tokens=max_tokens)
            self._run(other, report, max_rounds=1)
        finally:
            self._waiting = before
        return bool(other.jobs)

    def _may_be_overtaken(self, work: Work) -> bool:
        """Whether short work may overtake this job while it is decided: a long or an offline one.

        Not while a short interactive one is: who came later would overtake it, again and again, and nobody waits long
        for a pass of such jobs, since a turn's tokens bound it.
        """
        offline = work.job.asked_lane == "offline"
        return self._serves_short_work and (offline or work.prepared.tokens > self._engine.beside_tokens)

    @property
    def _serves_short_work(self) -> bool:
        return bool(self._engine.beside_tokens) and "interactive" in self._settings.lanes

    def _let_short_work_overtake(
        self, turn: Turn, stage: Stage, ids: Sequence[str], report: TurnReport
    ) -> bool:
        """Answer short work that waits, on what the suspended pass leaves; whether there was some."""
        late = self.grace.stopping or time.monotonic() > self._yields_until
        if late or not self._store.interactive_waits():
            return False
        self._suspended = True
        try:
            overtook = self._run_beside(turn, report, self._engine.beside_tokens)
        finally:
            self._suspended = False
        if overtook:
            self._store.progress(turn.lease, stage, ids)  # it waits no longer: what is lost now is its own
        return overtook

    # --- committing --------------------------------------------------------------------------------

    def _end(self, turn: Turn, found: Sequence[Found], report: TurnReport) -> None:
        """Commit what a pass has found out about some jobs: their answers in one round trip, then what went wrong."""
        decided, failed = list[tuple[Work, Success]](), list[tuple[Work, Exception]]()
        for work, what, seconds in found:
            if isinstance(what, Exception):
                failed.append((work, what))
            elif what.failed and (not work.job.partial or not what.answers):
                # Without any answer, or where the client wants all or none, the first refusal is the job's.
                failed.append((work, next(iter(what.failed.values()))))
            else:
                response = self._response(work, what)
                decided.append((work, Success(work.job.id, response, seconds * 1000)))
        began = time.time()
        accepted = self._store.succeed_all(
            turn.lease, [each for _, each in decided], self._engine.info.identity
        )
        for (work, success), took_ms in zip(decided, accepted, strict=True):
            outcome = "succeeded" if took_ms else "refused"
            turn.count(work.job, took_ms, {"tokenize": work.tokenize_ms, "pass": success.pass_ms})
            traces.tell_committed(work.job, (began, time.time()), outcome, success.response.usage)
            self._log(work, outcome, success.response.usage)
            report.jobs += 1
            report.work_tokens += work.prepared.tokens
        for work, error in failed:
            if self._suspended and isinstance(error, OutOfDeviceMemory):
                log.info("job.too_large_beside", job_id=work.job.id)
            else:
                self._fail(turn, work.job, error)

    def _response(self, work: Work, decided: Decided) -> DecisionResponse:
        """What a client reads: the answers in the order of its questions, and why some have none."""
        refused = {
            name: ErrorAnswer(error=QuestionError(code=error.code, message=error.message))
            for name, error in {**work.prepared.refused, **decided.failed}.items()
        }
        order = decode_questions(work.job.questions) if refused else decided.answers
        answers: dict[str, Answer] = {name: decided.answers.get(name) or refused[name] for name in order}
        return DecisionResponse(model=self._engine.info.full_name, answers=answers, usage=decided.usage)

    def _fail(self, turn: Turn, job: ClaimedJob, error: Exception) -> None:
        if not isinstance(error, D3ServeError):
            log.error("job.crashed", job_id=job.id, exc_info=error)
            what = "the worker ran out of memory" if isinstance(error, MemoryError) else "the worker failed"
            error = InternalError(f"{what} on this job")
        told = JobError(code=error.code, message=error.message, retryable=error.retryable, field=error.field)
        began = time.time()
        took_ms = self._store.fail(turn.lease, job.id, told)
        outcome = "failed" if took_ms else "refused"
        turn.count(job, took_ms, {})
        traces.tell_committed(job, (began, time.time()), outcome, code=error.code)
        log.info("job.done", job_id=job.id, status=outcome, code=error.code, attempt=job.attempt)

    def _log(self, work: Work, status: str, usage: Usage) -> None:
        log.info(
            "job.done", job_id=work.job.id, status=status, state_key=work.prepared.state_key[:16],
            attempt=work.job.attempt, questions=usage.questions, state_tokens=usage.state_tokens,
            state_cached=usage.state_cached,
        )  # fmt: skip
