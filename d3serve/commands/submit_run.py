"""A run of `d3serve submit`: so many lines at the server at once, each to its outcome, and what is shown of it."""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TaskProgressColumn

from d3serve.client import AsyncClient, Job
from d3serve.client.media import LISTS, with_files
from d3serve.commands.ask import told_progress
from d3serve.commands.request_file import Line
from d3serve.commands.result_file import ResultFile, ResultRow
from d3serve.commands.terminal import bar
from d3serve.commands.threads import AbandonedThreads
from d3serve.errors import (
    AlreadySucceeded,
    D3ServeError,
    InternalError,
    InvalidJSON,
    InvalidRequest,
    JobExpired,
    JobNotFinished,
    ServiceError,
    StateLost,
)

SHOW_EVERY_S: Final = 1.0
SAY_EVERY_S: Final = 30.0  # where there is no bar
READ_BYTES: Final = 64 * 2**10
RETRY_S: Final = 5.0  # between tries of a line that the server itself could not serve
SETTLE_S: Final = 5.0  # for a submission that an interrupt met on its way
CANCEL_WITHIN_S: Final = 20.0  # for all jobs of an interrupted run together
MAX_RERUNS: Final = 100  # of a line whose jobs were erased one after another
NOT_OF_THE_LINE: Final = frozenset(
    {401, 403, 407, 408, 425, 429}
)  # what any other line would be told as well


@dataclass
class RunPace:
    """How much of a run's work is done, and how fast: `size` in bytes of lines, which tokens are in proportion to."""

    lines: int
    size: int
    done: int = 0
    size_done: int = 0
    questions: int = 0
    tokens: int = 0
    begun: float = field(default_factory=time.monotonic)

    def count(self, line: Line, row: ResultRow) -> None:
        """Take in a line that has its outcome."""
        self.done += 1
        self.size_done += line.size
        usage = (row.get("result") or {}).get("usage") or {}
        self.questions += usage.get("questions", 0)
        self.tokens += usage.get("input_tokens", 0)

    @property
    def seconds(self) -> float:
        """How long the run has gone on."""
        return time.monotonic() - self.begun

    def speed(self) -> str:
        """How fast it goes, for people."""
        seconds = max(self.seconds, 1e-3)
        return f"{self.questions / seconds:,.1f} questions/s, {self.tokens / seconds:,.0f} tokens/s"

    def left(self) -> str:
        """How long it will take yet, for people; nothing before anything is known."""
        if not self.size_done:
            return ""
        seconds = round(self.seconds * (self.size - self.size_done) / self.size_done)
        hours, minutes = divmod(seconds // 60, 60)
        return f", {hours}:{minutes:02}:{seconds % 60:02} left"


@dataclass
class Run:
    """What the lines of one run share; `answered` is when the last of them got an outcome from the server.

    `troubled` are the lines that the server cannot serve, with when that began; `given_up` is when one was left so.
    After an interrupt `left` are the jobs that go on without it, and `unsure` counts submissions that it cut off.
    """

    url: str
    api_key: str | None
    results: ResultFile
    at_once: int
    patience_s: float
    console: Console
    total: int
    pace: RunPace
    cancel: bool = False  # the jobs that an interrupt leaves
    left: set[str] = field(default_factory=set)
    canceled: int = 0
    unsure: int = 0
    answered: float = -math.inf
    given_up: float = -math.inf
    asked: set[int] = field(default_factory=set)
    troubled: dict[int, float] = field(default_factory=dict)
    _posted: set[str] = field(default_factory=set)
    _running: Sequence[Job] = ()

    async def ask(self, lines: Iterator[Line]) -> None:
        """Bring every line to its outcome.

        Raises:
            D3ServeError: trouble that is not a line's own; what has an outcome is kept.
            CancelledError: it was interrupted.
        """
        asyncio.get_running_loop().set_default_executor(AbandonedThreads())
        columns = (
            "[progress.description]{task.description}", BarColumn(), TaskProgressColumn(), MofNCompleteColumn(),
            "{task.fields[pace]}",
        )  # fmt: skip
        with bar(self.console, *columns, stays=True) as self._progress:
            before = self.total - self.pace.lines
            self._task = self._progress.add_task("jobs", total=self.total, completed=before, pace="")
            async with AsyncClient(
                self.url, api_key=self.api_key, patience_s=self.patience_s
            ) as self._client:
                watch = asyncio.create_task(self._watch())
                try:
                    await self._all(lines)
                except asyncio.CancelledError:
                    if self.cancel:
                        await self._cancel_left()
                    raise
                except ExceptionGroup as trouble:  # the same, many times over
                    raise trouble.exceptions[0] from None
                finally:
                    watch.cancel()

    async def _all(self, lines: Iterator[Line]) -> None:
        """Take a line when one ends, so that no more are in memory than are at the server."""
        gate = asyncio.Semaphore(self.at_once)
        async with asyncio.TaskGroup() as group:
            while some := await asyncio.to_thread(_some, lines):
                for line in some:
                    await gate.acquire()
                    asked = group.create_task(self._line(line))
                    asked.add_done_callback(lambda _: gate.release())

    async def _line(self, line: Line) -> None:
        named = {} if line.custom_id is None else {"custom_id": line.custom_id}
        self.asked.add(line.number)
        row = {"line": line.number, **named, "request": line.request, **await self._outcome(line)}
        self.asked.discard(line.number)
        self.troubled.pop(line.number, None)
        self.results.add(row)
        self.pace.count(line, row)
        self._show()

    async def _outcome(self, line: Line) -> ResultRow:
        """What came of a line: its job, or a refusal of its request. Trouble of the server's is neither.

        Raises:
            D3ServeError: no line gets an outcome.
        """
        while True:
            began = time.monotonic()
            try:
                job = await self._job(line)
            except InternalError as error:  # our client has told this at once: it may be this line alone
                is_own = self._is_own(line, began)
                if is_own is None:
                    await asyncio.sleep(RETRY_S)
                    continue
                if not is_own:
                    raise
                self.given_up = time.monotonic()
                return _refused("failed", error)
            except D3ServeError as error:
                if not _is_of_the_line(error):
                    raise
                row = _refused("refused", error)
            else:
                row = {"id": job.id, "status": job.status}
                row |= {"result": job.result} if job.result is not None else {"error": job.error}
            if line.body is not None:
                self.answered = time.monotonic()
            return row

    def _is_own(self, line: Line, began: float) -> bool | None:
        """Whether trouble is a line's own and not the server's; None while it may pass, or other lines may show it.

        It is if the server has answered another line since; or if nobody else asks, and it has since a line was given
        up: so one line does not keep those after it, and a server that is broken does not fail them one by one.

        Args:
            line: what the server could not serve just now.
            began: when it was asked. Trouble after a try that went well for so long is another.
        """
        now = time.monotonic()
        if now > began + self.patience_s:
            self.troubled.pop(line.number, None)
        since = self.troubled.setdefault(line.number, now)
        if now < since + self.patience_s:
            return None
        if self.answered > since:
            return True
        others = self.asked - {line.number}
        if others - self.troubled.keys():
            return None
        return not others and self.answered > self.given_up

    async def _job(self, line: Line) -> Job:
        """The line's job when it is done: the one that an earlier run made, run again if it did not succeed, or a new.

        Raises:
            D3ServeError: there is none; says why.
        """
        if line.body is None:
            raise line.refusal or InvalidJSON("the line holds no request")
        body: Mapping[str, Any] = line.body
        if any(name in body for name in LISTS):  # not before: all at once may be too much
            body = await asyncio.to_thread(with_files, body, line.folder)
        job = await self._submitted(body, f"submit-{line.request}")
        self._posted.add(job.id)
        try:
            return await self._client.wait(job.id)
        except asyncio.CancelledError:
            self.left.add(job.id)
            raise
        finally:
            self._posted.discard(job.id)

    async def _submitted(self, body: Mapping[str, Any], key: str) -> Job:
        for rerun in range(MAX_RERUNS):
            with suppress(JobExpired):  # it was erased, or its input was: ask anew
                job = await self._post(body, f"{key}-{rerun}" if rerun else key)
                if job.done and job.status != "succeeded":
                    await self._run_again(job)
                return job
        raise InvalidRequest(
            f"the jobs of this line were lost {MAX_RERUNS} times: give it another `custom_id`"
        )

    async def _post(self, body: Mapping[str, Any], key: str) -> Job:
        """Post a job; an interrupt lets the server say whether it took it."""
        posting = asyncio.create_task(self._client.submit_body(body, idempotency_key=key))
        try:
            return await asyncio.shield(posting)
        except asyncio.CancelledError:
            await asyncio.wait([posting], timeout=SETTLE_S)
            if posting.cancel() or posting.exception() is not None:
                self.unsure += 1
            else:
                self.left.add(posting.result().id)
            raise

    async def _run_again(self, job: Job) -> None:
        """Queue a job that an earlier run left without success.

        Raises:
            JobExpired: it cannot be, for its input is gone.
        """
        if (job.error or {}).get("code") == StateLost.code:
            raise JobExpired(f"the state of job {job.id} is lost")
        with suppress(JobNotFinished, AlreadySucceeded):  # somebody has done so already
            await self._client.retry(job.id)

    async def _cancel_left(self) -> None:
        """Cancel the jobs that were waited for, as far as the server answers soon; a second interrupt ends this."""
        canceling = [asyncio.create_task(self._client.cancel(job_id)) for job_id in self.left]
        if not canceling:
            return
        done, late = await asyncio.wait(canceling, timeout=CANCEL_WITHIN_S)
        for task in late:
            task.cancel()
        ended = [task.result() for task in done if task.exception() is None]
        self.canceled = len([job for job in ended if job is not None and job.status == "canceled"])

    # --- what is shown -----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Show how far the jobs that run have come, a second at a time, for as long as it is let."""
        while self._progress.disable:
            await asyncio.sleep(SAY_EVERY_S)
            ended = self.total - self.pace.lines + self.pace.done
            told = f"{ended} of {self.total} lines: {self.pace.speed()}{self.pace.left()}"
            self.console.print(told, highlight=False, soft_wrap=True, markup=False)
        while True:
            await asyncio.sleep(SHOW_EVERY_S)
            with suppress(D3ServeError):  # it is only the bar
                self._running = (await self._client.list(status="running", limit=100)).jobs
            self._show()

    def _show(self) -> None:
        shares = (
            told_progress(job.raw.get("progress"))[0] for job in self._running if job.id in self._posted
        )
        ended = self.total - self.pace.lines + self.pace.done
        pace = self.pace.speed() + self.pace.left()
        self._progress.update(self._task, completed=ended + sum(shares), pace=pace)

    _progress: Progress = field(init=False)
    _task: TaskID = field(init=False)
    _client: AsyncClient = field(init=False)


def _some(lines: Iterator[Line]) -> list[Line]:
    """The next lines, few enough to be nothing in memory; a thread for each would cost as much as to send it."""
    some, size = list[Line](), 0
    while size < READ_BYTES and (line := next(lines, None)) is not None:
        some.append(line)
        size += line.size
    return some


def _refused(status: str, error: D3ServeError) -> dict[str, Any]:
    return {"id": None, "status": status, "error": {"code": error.code, "message": error.message}}


def _is_of_the_line(error: D3ServeError) -> bool:
    status = error.details.get("status", error.http_status)
    return not isinstance(error, ServiceError) and 400 <= status < 500 and status not in NOT_OF_THE_LINE
