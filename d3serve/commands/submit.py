"""`d3serve submit`: many jobs from a file of JSON lines, results into another, resumable."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TimeRemainingColumn,
)

from d3serve.client import AsyncClient, Job
from d3serve.client.media import with_files
from d3serve.commands.ask import find_server, told_progress
from d3serve.commands.options import DEFAULT_URL, Key, KeyFile, Url, read_key
from d3serve.commands.result_file import ResultFile, ResultRow
from d3serve.commands.terminal import bar, messages
from d3serve.commands.threads import AbandonedThreads
from d3serve.errors import (
    AlreadySucceeded,
    D3ServeError,
    InternalError,
    InvalidJSON,
    InvalidRequest,
    JobExpired,
    JobNotFinished,
    QueueFull,
    RateLimited,
    ServiceError,
    StateLost,
)
from d3serve.text.strict_json import read_json

PATIENCE_S: Final = 600.0  # a deploy, a broker's restart and a full queue of minutes end within it
SHOW_EVERY_S: Final = 1.0
RETRY_S: Final = 5.0  # between tries of a line that the server itself could not serve
MAX_DEPTH: Final = 200  # what an API may be set to allow; its own limit is the one that counts
MAX_RERUNS: Final = 100  # of a line whose jobs were erased one after another
NOT_OF_THE_LINE: Final = frozenset(
    {401, 403, 407, 408, 425, 429}
)  # what any other line would be told as well


@dataclass(frozen=True)
class Line:
    """A line of the request file: its body, or why it holds none; `digest` is its place and its content."""

    number: int
    digest: str
    body: Mapping[str, Any] | None = None
    refusal: D3ServeError | None = None
    folder: Path = Path()  # where the images and videos lie that it names


def submit(
    requests: Annotated[
        Path, typer.Argument(help="JSON Lines file; each line is a request with `state` and `questions`.")
    ],
    out: Annotated[
        Path, typer.Option(help="Results as JSON Lines; requests that already have a result are skipped.")
    ],
    at_once: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of jobs in flight.")] = 64,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    api_key_file: KeyFile = None,
) -> None:
    """Submit many jobs and collect their results; run it again to resume."""
    key = read_key(api_key, api_key_file)
    failed = submit_file(requests, out, url=url, api_key=key, at_once=at_once, console=messages())
    raise typer.Exit(1 if failed else 0)


def submit_file(
    requests: Path,
    out: Path,
    *,
    url: str,
    api_key: str | None,
    at_once: int,
    console: Console,
    patience_s: float = PATIENCE_S,
) -> int:
    """Submit every line of `requests` that has not succeeded by what `out` says; return how many have not in all.

    A job's key follows from its line, so a line that was submitted just before a crash finds its job again.
    Trouble on the server's side, or on the way there, is waited out for up to `patience_s`.

    Raises:
        InvalidRequest: a file cannot be read or written, or a result belongs to another request than the one on
            its line; names the line.
        Unauthorized, Forbidden: the API key is refused.
        ServiceError, RateLimited, QueueFull: the trouble lasted longer; run it again to go on.
    """
    lines = read_lines(requests)
    with ResultFile(out) as results:
        for number, row in results.rows.items():
            if row["status"] == "succeeded" and (
                number not in lines or row["request"] != lines[number].digest
            ):
                raise InvalidRequest(
                    f"{out} holds the result of another request for line {number}: "
                    f"give {requests} an --out of its own",
                    field="out",
                )
        results.keep(lambda row: row["status"] == "succeeded")
        waiting = [line for number, line in lines.items() if number not in results.rows]
        if waiting:
            find_server(url, api_key)
        try:
            asyncio.run(_submit_all(waiting, results, len(lines), url, api_key, at_once, patience_s, console))
        except (ServiceError, RateLimited, QueueFull) as error:
            raise type(error)(f"{error.message}; run it again to go on", details=error.details) from error
        except KeyboardInterrupt:
            _say(
                console,
                f"stopped: {len(results.rows)} of {len(lines)} have an outcome; jobs that were submitted, at most "
                f"{at_once}, run on, and the next run of the same command finds them",
            )
            raise
        return _told(results, len(lines), out, console)


def _told(results: ResultFile, total: int, out: Path, console: Console) -> int:
    """How many lines did not succeed, after saying so by their codes."""
    codes = Counter((row.get("error") or {}).get("code", row["status"]) for row in _failures(results))
    failed = codes.total()
    if failed:
        listed = ", ".join(f"{count} {code}" for code, count in codes.most_common())
        _say(
            console,
            f"{failed} of {total} did not succeed: {out} says why ({listed}); the next run asks them again",
        )
    return failed


def _failures(results: ResultFile) -> list[ResultRow]:
    return [row for row in results.rows.values() if row["status"] != "succeeded"]


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def read_lines(path: Path) -> dict[int, Line]:
    """The requests of a file, by line number; one that is no strict JSON object holds its refusal.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    try:
        texts = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="requests") from None
    return {number: _line(path, number, text) for number, text in enumerate(texts, 1) if text.strip()}


def _line(path: Path, number: int, text: bytes) -> Line:
    try:
        body = read_json(text, max_depth=MAX_DEPTH)
        if not isinstance(body, dict):
            raise InvalidJSON("the body is no JSON object")
    except InvalidJSON as error:
        digest = hashlib.sha256(b"%d %b" % (number, text)).hexdigest()
        message = error.message.replace("the body", "it", 1).replace("at line 1 column", "at column")
        return Line(number, digest, refusal=type(error)(f"{path} line {number}: {message}"))
    return Line(
        number, hashlib.sha256(json.dumps([number, body]).encode()).hexdigest(), body, folder=path.parent
    )


@dataclass
class _Run:
    """What the lines of one run share; `answered` is when the last of them got an outcome from the server."""

    client: AsyncClient
    results: ResultFile
    patience_s: float
    gate: asyncio.Semaphore
    progress: Progress
    task: TaskID
    ended: int
    answered: float = field(default_factory=time.monotonic)
    posted: set[str] = field(default_factory=set)
    running: Sequence[Job] = ()

    async def line(self, line: Line) -> None:
        """Ask a line and keep its outcome."""
        async with self.gate:
            row = {"line": line.number, "request": line.digest, **await self._outcome(line)}
        self.results.add(row)
        self.ended += 1
        self._show()

    async def watch(self) -> None:
        """Show how far the jobs that run have come, a second at a time, for as long as it is let."""
        while True:
            await asyncio.sleep(SHOW_EVERY_S)
            with suppress(D3ServeError):  # it is only the bar
                self.running = (await self.client.list(status="running", limit=100)).jobs
                self._show()

    def _show(self) -> None:
        shares = (told_progress(job.raw.get("progress"))[0] for job in self.running if job.id in self.posted)
        self.progress.update(self.task, completed=self.ended + sum(shares))

    async def _outcome(self, line: Line) -> ResultRow:
        """What came of a line: its job, or a refusal of its request. Trouble of the server's is neither.

        Raises:
            D3ServeError: no line gets an outcome.
        """
        until = time.monotonic() + self.patience_s
        while True:
            try:
                job = await _job(self.client, line, self.posted)
            except InternalError as error:  # our client has told this at once: it may be this line alone
                if time.monotonic() < until:
                    await asyncio.sleep(RETRY_S)
                    continue
                if self.answered + self.patience_s < time.monotonic():
                    raise
                return _refused("failed", error)
            except D3ServeError as error:
                if not _is_of_the_line(error):
                    raise
                row = _refused("refused", error)
            else:
                row = {"id": job.id, "status": job.status}
                row |= {"result": job.result} if job.result is not None else {"error": job.error}
            self.answered = time.monotonic()
            return row


def _refused(status: str, error: D3ServeError) -> dict[str, Any]:
    return {"id": None, "status": status, "error": {"code": error.code, "message": error.message}}


def _is_of_the_line(error: D3ServeError) -> bool:
    status = error.details.get("status", error.http_status)
    return not isinstance(error, ServiceError) and 400 <= status < 500 and status not in NOT_OF_THE_LINE


async def _job(client: AsyncClient, line: Line, posted: set[str]) -> Job:
    """The line's job when it is done: the one that an earlier run made, run again if it did not succeed, or a new one.

    Its id is among those `posted` meanwhile.

    Raises:
        D3ServeError: there is none; says why.
    """
    if line.body is None:
        raise line.refusal or InvalidJSON("the line holds no request")
    key = f"submit-{line.digest}"
    body = await asyncio.to_thread(
        with_files, line.body, line.folder
    )  # not before: all at once may be too much
    for rerun in range(MAX_RERUNS):
        with suppress(JobExpired):  # it was erased, or its input was: ask anew
            job = await client.submit_body(body, idempotency_key=f"{key}-{rerun}" if rerun else key)
            if job.done and job.status != "succeeded":
                await _run_again(client, job)
            break
    else:
        raise InvalidRequest(
            f"the jobs of this line were lost {MAX_RERUNS} times: give it another place in its file"
        )
    posted.add(job.id)
    try:
        return await client.wait(job.id)
    finally:
        posted.discard(job.id)


async def _run_again(client: AsyncClient, job: Job) -> None:
    """Queue a job that an earlier run left without success.

    Raises:
        JobExpired: it cannot be, for its input is gone.
    """
    if (job.error or {}).get("code") == StateLost.code:
        raise JobExpired(f"the state of job {job.id} is lost")
    with suppress(JobNotFinished, AlreadySucceeded):  # somebody has done so already
        await client.retry(job.id)


async def _submit_all(
    waiting: list[Line],
    results: ResultFile,
    total: int,
    url: str,
    api_key: str | None,
    at_once: int,
    patience_s: float,
    console: Console,
) -> None:
    asyncio.get_running_loop().set_default_executor(AbandonedThreads())
    columns = (
        "[progress.description]{task.description}",
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with bar(console, *columns, stays=True) as progress:
        task = progress.add_task("jobs", total=total, completed=total - len(waiting))
        try:
            async with AsyncClient(url, api_key=api_key, patience_s=patience_s) as client, \
                    asyncio.TaskGroup() as group:  # fmt: skip
                run = _Run(
                    client,
                    results,
                    patience_s,
                    asyncio.Semaphore(at_once),
                    progress,
                    task,
                    total - len(waiting),
                )
                lines = [group.create_task(run.line(line)) for line in waiting]
                if lines and not progress.disable:
                    watch = group.create_task(run.watch())
                    await asyncio.wait(lines)
                    watch.cancel()
        except ExceptionGroup as trouble:  # the same, many times over
            raise trouble.exceptions[0] from None
