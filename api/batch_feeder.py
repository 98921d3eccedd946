"""The feeder of batches: submits a window of a batch's lines, gathers what became of them, step by step.

Whatever it was doing when it was killed is done again by whoever claims the batch next, with the same outcome: what a
step achieves is written at once or not at all (docs/adr/0013).
"""

import asyncio
import contextlib
import json
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from d3serve.api.batch_lines import (
    ENDINGS,
    BatchLine,
    InputCheck,
    InputLines,
    Outcome,
    RecentPieces,
    failed,
    finding,
    label_of,
    outcome_of,
    read_line,
    undone,
)  # fmt: skip
from d3serve.api.intake import Taken, check_payload
from d3serve.api.served import ServedModels
from d3serve.errors import (
    D3ServeError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    NoWorker,
    QueueFull,
    QuotaExceeded,
    StateLost,
    StorageUnavailable,
)  # fmt: skip
from d3serve.schemas import FINAL_STATUSES, Lane
from d3serve.settings import Settings
from d3serve.store.batches import BatchRecord, BatchStep, BatchStore, Cursor, Ended
from d3serve.store.jobs import JobStore
from d3serve.store.records import JobRecord
from d3serve.tracing import Attributes, telling

log = structlog.get_logger("d3serve.batches")

WINDOW: Final = 256  # lines of a batch in flight: several full turns of a worker
WINDOW_BYTES: Final = 32 * 2**20
STEP_S: Final = 5.0  # a step ends early after so long: others wait
STEP_TEXT_BYTES: Final = 2**20  # of outcomes
LEASE_S = 30.0
LOOK_AGAIN_S: Final = 0.25
SOON_S: Final = 0.05  # after a step that moved much of the window: workers may soon have none of it left
CROWDED_S: Final = 2.0  # where the queue is full, or nobody serves a model
IDLE_S: Final = 0.25
JOB_TTL_S: Final = 2 * 86_400  # of a line's job: longer than its batch
READ_AT_ONCE: Final = 8  # results of the largest jobs come to 2 MB
LOST: Final = (NotFound, StateLost)
NO_ROOM: Final = (QueueFull, QuotaExceeded, StorageUnavailable, NoWorker)  # now; there may be later


@dataclass(frozen=True)
class Means:
    """What a feeder works with."""

    batches: BatchStore
    jobs: JobStore
    models: ServedModels
    pieces: RecentPieces
    settings: Settings
    wake: Callable[[Lane], Any]

    async def lines(self, batch: BatchRecord) -> InputLines:
        """The input of a batch."""
        file = await self.batches.files.get(batch.input_file, batch.tenant)
        return InputLines(self.pieces, file, self.settings.max_body_bytes)


class Feeder:
    """Takes the batches that are due, one at a time."""

    def __init__(
        self, batches: BatchStore, jobs: JobStore, settings: Settings, wake: Callable[[Lane], Any]
    ) -> None:
        self._batches = batches
        self._settings = settings
        self._stop = asyncio.Event()
        pieces = RecentPieces(batches.files.pieces)
        self._means = Means(batches, jobs, ServedModels(jobs, settings), pieces, settings, wake)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; a step that is under way ends first, or gives up within a piece of the input."""
        self._stop = stop
        while not stop.is_set():
            try:
                worked = await self.work()
            except StorageUnavailable as error:  # the claim runs out, and the batch is due again
                log.warning("batches.storage", reason=error.message)
                worked = False
            except Exception as error:  # one batch that breaks us must not stop the others
                # Frames and type only: the text of an unforeseen exception may quote a line.
                trace = "".join(traceback.format_tb(error.__traceback__))
                log.error("batches.unforeseen", kind=type(error).__name__, trace=trace)
                worked = False
            if not worked:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), IDLE_S)

    async def work(self) -> bool:
        """Do a step of the batch that is due; False if none is."""
        batch = await self._batches.claim(LEASE_S)
        if batch is None:
            return False
        if batch.status == "validating":
            await self._validate(batch)
        elif batch.status == "cancelling" and not batch.total:
            await self._batches.step(batch, BatchStep(), 0, Ended("cancelled"))
        else:
            await _Turn(self._means, batch).run()
        return True

    # --- validation --------------------------------------------------------------------------------

    async def _validate(self, batch: BatchRecord) -> None:
        """Read the whole input, and begin or end the batch."""
        try:
            check = await self._look_through(batch)
        except LOST as error:
            check = InputCheck(batch.endpoint, 0, [finding(error, None)])
        if check is None:
            return
        if errors := check.findings():
            await self._batches.step(batch, BatchStep(), 0, Ended("failed", tuple(errors)))
            log.info("batch.refused", batch=batch.id, errors=len(errors))
            return
        at_ms = int(1000 * await self._batches.now_s())
        began = BatchStep(fields={"status": "in_progress", "in_progress_at": at_ms, "total": check.count})
        await self._batches.step(batch, began, 0)
        log.info("batch.begun", batch=batch.id, lines=check.count)

    async def _look_through(self, batch: BatchRecord) -> InputCheck | None:
        """What there is to say of the input; None if another feeder took over, or this one is to stop."""
        check = InputCheck(batch.endpoint, self._settings.max_body_bytes)
        lines, cursor = await self._means.lines(batch), Cursor()
        renew_at = time.monotonic() + LEASE_S / 4
        while not check.is_over:
            text, after = await lines.next(cursor)
            if text is None:
                break
            check.look(text, cursor.line)
            cursor = after
            if self._stop.is_set():
                await self._batches.step(batch, BatchStep(), 0)  # due at once, for whoever is there
                return None
            if time.monotonic() > renew_at:
                renew_at = time.monotonic() + LEASE_S / 4
                if not await self._batches.step(batch, BatchStep(), LEASE_S):
                    return None
        return check


class _Turn:
    """One step of a batch that has begun."""

    def __init__(self, means: Means, batch: BatchRecord) -> None:
        self._means = means
        self._batches, self._jobs, self._settings = means.batches, means.jobs, means.settings
        self._batch = batch
        self._step = BatchStep()
        self._flight: dict[int, tuple[str, int]] = {}
        self._ending = batch.ending
        self._input_read = batch.input_read
        self._until = time.monotonic() + STEP_S
        self._delay_s = LOOK_AGAIN_S

    async def run(self) -> None:
        """Look for an end, gather, feed or give up, and write it all."""
        self._flight = await self._batches.in_flight(self._batch)
        await self._look_for_an_end()
        await self._gather()
        if not self._input_read:
            try:
                await (self._give_up() if self._ending else self._feed())
            except LOST:
                self._end_early("failed")
                self._note_read()
        ended = self._ended()
        if not self._step.is_empty:
            self._delay_s = SOON_S if self._step.moved >= WINDOW // 8 else LOOK_AGAIN_S
        gathered = [self._flight[line][0] for line in self._step.done]
        if await self._batches.step(self._batch, self._step, self._delay_s, ended):
            with contextlib.suppress(StorageUnavailable):  # they go with their time
                await self._batches.erase_jobs(self._batch, gathered)
        if ended:
            log.info("batch.ended", batch=self._batch.id, status=ended.status)

    # --- ends --------------------------------------------------------------------------------------

    async def _look_for_an_end(self) -> None:
        if not self._ending and self._batch.status == "cancelling":
            self._end_early("cancelled")
        elif not self._ending and await self._batches.now_s() >= self._batch.expires_at:
            self._end_early("expired")
        if self._ending:
            for job_id, _ in self._flight.values():
                with contextlib.suppress(D3ServeError):  # it has gone, which gathering notices
                    await self._jobs.cancel(job_id, self._batch.tenant)

    def _end_early(self, ending: str) -> None:
        self._ending = self._ending or ending
        self._step.fields["ending"] = self._ending
        if self._ending != "cancelled":
            self._step.fields["status"] = "finalizing"

    def _note_read(self) -> None:
        self._input_read = True
        self._step.fields["input_read"] = 1

    def _ended(self) -> Ended | None:
        step, counts = self._step, self._batch.counts
        if not self._input_read or len(self._flight) + len(step.fed) > len(step.done):
            return None
        match self._ending:
            case "cancelled":
                return Ended("cancelled")
            case "expired":
                return Ended("expired")
            case "failed":
                return Ended("failed", (finding(NotFound("the input is no longer kept"), None),))
        if counts["completed"] + step.sums.get("completed", 0):
            return Ended("completed")
        return Ended("failed", ({"code": "all_requests_failed", "line": None, "param": None,
                                 "message": "no request succeeded; the error file says why"},))  # fmt: skip

    # --- what comes out ----------------------------------------------------------------------------

    async def _gather(self) -> None:
        """Write down what became of jobs that have ended."""
        lines = sorted(self._flight)
        statuses = await self._batches.statuses([self._flight[line][0] for line in lines])
        over = [
            line
            for line, status in zip(lines, statuses, strict=True)
            if status is None or status in FINAL_STATUSES
        ]
        for start in range(0, len(over), READ_AT_ONCE):
            if self._step.text_bytes >= STEP_TEXT_BYTES:
                return
            some = over[start : start + READ_AT_ONCE]
            ids = [self._flight[line][0] for line in some]
            labels, jobs = await self._batches.labels(self._batch, some), await self._batches.jobs(ids)
            for line, label, job_id, job in zip(some, labels, ids, jobs, strict=True):
                self._write(self._outcome(label, job_id, job))
                self._step.done.append(line)
                if job is not None and job.status == "succeeded" and job.usage is not None:
                    usage = job.usage
                    self._step.add("input_tokens", usage.input_tokens)
                    self._step.add("cached_tokens", max(0, usage.input_tokens - usage.computed_tokens))

    def _outcome(self, label: str, job_id: str, job: JobRecord | None) -> Outcome:
        """What became of a job; also where we cannot say it, for that would hold up the batch for ever."""
        try:
            return outcome_of(self._batch.endpoint, label, job_id, job, self._ending)
        except Exception as error:
            log.error("batches.unforeseen", batch=self._batch.id, job_id=job_id, kind=type(error).__name__)
            told = InternalError("something broke on our side while this answer was written")
            return failed(self._batch.endpoint, json.loads(label)[0], told, job_id)

    def _write(self, outcome: Outcome) -> None:
        self._step.write(outcome.kind, outcome.text)
        self._step.add("completed" if outcome.kind == "output" else "failed", 1)

    async def _give_up(self) -> None:
        """Tell of the lines that no job was made of."""
        async for text, _ in self._unread():
            line = self._read(text)
            self._write(undone(line.custom_id if line else "", *ENDINGS[self._ending]))

    def _read(self, text: str) -> BatchLine | None:
        """A line that validation has accepted; None if that was with other limits."""
        with contextlib.suppress(D3ServeError):
            return read_line(text, self._batch.endpoint, self._settings.max_body_bytes)
        return None

    # --- what goes in ------------------------------------------------------------------------------

    async def _unread(self) -> AsyncIterator[tuple[str, int]]:
        """Lines from the cursor on, for as long as this step may take; each is read once the next is asked for."""
        lines, cursor = await self._means.lines(self._batch), self._batch.cursor
        while time.monotonic() < self._until and self._step.text_bytes < STEP_TEXT_BYTES:
            text, after = await lines.next(cursor)
            if text is None:
                self._note_read()
                return
            if text.strip():
                yield text, cursor.line
            cursor = after
            self._step.fields["cursor"] = str(cursor)

    async def _feed(self) -> None:
        """Make jobs of lines until the window is full."""
        done = set(self._step.done)
        flying = [size for line, (_, size) in self._flight.items() if line not in done]
        room, room_bytes = WINDOW - len(flying), WINDOW_BYTES - sum(flying)
        if room <= 0 or room_bytes <= 0:
            return
        if not await self._means.models.live():  # an alias leads to what a worker serves: wait for one
            self._delay_s = CROWDED_S
            return
        with contextlib.suppress(*NO_ROOM):  # what was achieved is written all the same: it makes room
            self._delay_s = CROWDED_S
            async for text, number in self._unread():
                if room <= 0 or room_bytes <= 0:
                    break
                size = len(text.encode())
                await self._submit(text, number, size)
                room, room_bytes = room - 1, room_bytes - size
            self._delay_s = LOOK_AGAIN_S

    async def _submit(self, text: str, number: int, size: int) -> None:
        """Make a job of a line, or find the one that was made of it before; a request at fault has its outcome."""
        batch, line = self._batch, self._read(text)
        if line is None:
            told = InvalidRequest("the line is beyond what this server takes now")
            self._write(failed(batch.endpoint, "", told))
            return
        try:
            label, job_id = await self._job_of(line, number)
        except NO_ROOM:
            raise
        except D3ServeError as error:
            self._write(failed(batch.endpoint, line.custom_id, error))
        else:
            self._step.fed.append((number, f"{job_id} {size}", label))

    async def _job_of(self, line: BatchLine, number: int) -> tuple[str, str]:
        batch = self._batch
        try:
            taken = check_payload(line.body, self._settings, any_dialect=batch.endpoint == "/v1/decisions")
        except D3ServeError:
            raise
        except Exception as error:
            log.error("batches.unforeseen", batch=batch.id, line=number, kind=type(error).__name__)
            raise InternalError("something broke on our side while this request was read") from error
        if taken.request.options.webhook is not None:
            raise InvalidRequest("a request of a batch names no webhook", field="job.webhook")
        model, revision = await self._served(taken)
        ttl_s = min(JOB_TTL_S, self._settings.max_result_ttl_s)
        options = taken.request.options.model_copy(update={"lane": "offline", "result_ttl_s": ttl_s})
        about: Attributes = {"d3serve.batch_id": batch.id, "d3serve.line": number}
        with telling("batch line", None, about, kind="producer", begins=True) as told:
            submitted = await self._jobs.submit(
                replace(taken.request, model=model, options=options),
                tenant=batch.tenant,
                idempotency_key=f"batch {batch.id} {number}",  # the same line, whoever feeds it again
                idempotency_ttl_s=JOB_TTL_S,
                revision=revision,
                traceparent=told.traceparent,
            )
            told.attributes["d3serve.job_id"] = submitted.job_id
        if submitted.wake:
            await asyncio.to_thread(self._means.wake, submitted.lane)
        return label_of(line.custom_id, taken.names), submitted.job_id

    async def _served(self, taken: Taken) -> tuple[str, str]:
        """The model that a line names, and its revision; of a name that leads nowhere the endpoint's refusal."""
        try:
            return await self._means.models.resolve(taken.request.model, taken.request.kinds)
        except ModelNotFound:
            if await self._means.models.live():
                raise
            raise NoWorker("no live worker serves a model") from None  # all went since this step began
