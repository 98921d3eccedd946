"""`d3serve submit`: many jobs from a file, results into another, resumable."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from d3serve.client.sending import DEFAULT_URL
from d3serve.commands.ask import find_server
from d3serve.commands.options import Key, KeyFile, Url, read_key
from d3serve.commands.questions import Choice, Questions, Score, YesNo, build_questions
from d3serve.commands.request_file import Line, RequestFile
from d3serve.commands.result_file import ResultFile
from d3serve.commands.submit_run import Run, RunPace
from d3serve.commands.terminal import messages, printing
from d3serve.errors import InvalidRequest, QueueFull, RateLimited, ServiceError
from d3serve.text.wording import shown

AsJson = Annotated[
    bool, typer.Option("--json", help="At the end print on standard output how the lines ended, as JSON.")
]
PATIENCE_S: Final = 600.0  # a deploy, a broker's restart and a full queue of minutes end within it


def submit(
    requests: Annotated[
        Path,
        typer.Argument(
            help="JSON lines or CSV, also as .gz; `-` is standard input. A line has `state`, and `questions` or those "
            "of the flags, and may have a `custom_id`."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Results as JSON lines; lines that have one there are skipped. `-` is standard output."
        ),
    ],
    questions: Questions = None,
    yes_no: YesNo = None,
    choice: Choice = None,
    score: Score = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="The input is CSV, whatever its name.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask lines again that did not succeed.")
    ] = False,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="At the end put the results in the order of the lines.")
    ] = False,
    cancel_on_interrupt: Annotated[
        bool, typer.Option("--cancel-on-interrupt", help="On Ctrl-C cancel the jobs that are at the server.")
    ] = False,
    as_json: AsJson = False,
    at_once: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of jobs in flight.")] = 64,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    api_key_file: KeyFile = None,
) -> None:
    """Submit many jobs and collect their results; run it again to resume."""
    failed = submit_file(
        requests,
        out,
        url=url,
        api_key=read_key(api_key, api_key_file),
        at_once=at_once,
        console=messages(),
        questions=build_questions(yes_no or (), choice or (), score or (), questions),
        as_csv=as_csv,
        retry_failed=retry_failed,
        in_order=in_order,
        cancel_on_interrupt=cancel_on_interrupt,
        as_json=as_json,
    )
    raise typer.Exit(1 if failed else 0)


def submit_file(
    requests: Path,
    out: Path,
    *,
    url: str,
    api_key: str | None,
    at_once: int,
    console: Console,
    questions: Mapping[str, Any] | None = None,
    as_csv: bool = False,
    retry_failed: bool = False,
    in_order: bool = False,
    cancel_on_interrupt: bool = False,
    as_json: bool = False,
    patience_s: float = PATIENCE_S,
) -> int:
    """Ask every line of `requests` that has no row in `out` yet; return how many have not succeeded in all.

    A line is known by its `custom_id`, else by what it asks, so it may move. A job's key follows from its line, so a
    line that was submitted just before a crash finds its job again. Trouble on the server's side, or on the way there,
    is waited out for up to `patience_s`.

    Raises:
        InvalidRequest: a file cannot be read or written, or two lines have one `custom_id`.
        Unauthorized, Forbidden: the API key is refused.
        ServiceError, RateLimited, QueueFull: the trouble lasted longer; run it again to go on.
    """
    asked = RequestFile(requests, questions or {}, as_csv)
    with asked, ResultFile(out) as results:
        _require_file(results, {"--in-order": in_order, "--json": as_json})
        plan = survey(asked, results, retry_failed=retry_failed)
        if plan.waiting:
            find_server(url, api_key)
        results.rewrite(plan.kept(results))
        pace = RunPace(plan.waiting, plan.size)
        run = Run(
            url, api_key, results, at_once, patience_s, console, len(plan.order), pace, cancel_on_interrupt
        )
        try:
            if plan.waiting:
                asyncio.run(run.ask(plan.missing(asked, results)))
        except (ServiceError, RateLimited, QueueFull) as error:
            raise type(error)(f"{error.message}; run it again to go on", details=error.details) from error
        except KeyboardInterrupt:
            _say(console, _stopped(run, plan, results, out))
            raise
        if in_order:
            results.rewrite(plan.in_order(results))
        return _told(run, plan, results, out, console, as_json=as_json)


def _require_file(results: ResultFile, flags: Mapping[str, bool]) -> None:
    """Refuse what cannot be where the results go to standard output."""
    for flag in (flag for flag, given in flags.items() if given and not results.is_file):
        raise InvalidRequest(f"{flag} needs an --out that is a file", field="out")


@dataclass
class Survey:
    """The lines of a request file by key, in order, and how many of them, of what size, wait for an answer."""

    order: dict[bytes, int] = field(default_factory=dict)
    waiting: int = 0
    size: int = 0

    def kept(self, results: ResultFile) -> list[tuple[bytes, int | None]]:
        """The rows that stay, where they are: of lines that have one, and of lines that are gone what succeeded."""
        rows = sorted(results.entries.items(), key=lambda row: row[1].offset)
        return [(key, self.order.get(key)) for key, row in rows if key in self.order or not row.code]

    def in_order(self, results: ResultFile) -> list[tuple[bytes, int | None]]:
        """The rows in the order of their lines; then those of lines that are gone."""
        there: list[tuple[bytes, int | None]] = [
            row for row in self.order.items() if row[0] in results.entries
        ]
        return there + [row for row in self.kept(results) if row[1] is None]

    def missing(self, asked: RequestFile, results: ResultFile) -> Iterator[Line]:
        """The lines that have no row."""
        return (line for line in asked.lines() if line.identity.key not in results.entries)

    def answered(self, results: ResultFile) -> int:
        """How many lines have an outcome."""
        return sum(key in results.entries for key in self.order)


def survey(asked: RequestFile, results: ResultFile, *, retry_failed: bool) -> Survey:
    """Read the file once: what waits, and which results are no answer to what their lines ask now; those are dropped.

    Raises:
        InvalidRequest: two lines have one `custom_id`.
    """
    plan = Survey()
    for line in asked.lines():
        key, request = line.identity
        if key in plan.order:
            raise InvalidRequest(
                f"custom_id {shown(line.custom_id)} is on line {plan.order[key]} of {asked.name} and on line "
                f"{line.number}: give each line its own",
                field="custom_id",
            )
        plan.order[key] = line.number
        row = results.entries.get(key)
        if row is not None and (row.request != request or (row.code and retry_failed)):
            del results.entries[key]
            row = None
        if row is None:
            plan.waiting += 1
            plan.size += line.size
    return plan


def _stopped(run: Run, plan: Survey, results: ResultFile, out: Path) -> str:
    left = len(run.left) - run.canceled
    said = f"stopped: {plan.answered(results)} of {len(plan.order)} lines have an outcome in {out}"
    if run.cancel:
        said += f"; {run.canceled} jobs were canceled"
    if left or not run.cancel:
        said += f"; {left} jobs run on at the server"
    if run.unsure:
        said += f"; whether {run.unsure} more were taken is not known"
    return f"{said}; the same command goes on from here"


def _told(run: Run, plan: Survey, results: ResultFile, out: Path, console: Console, *, as_json: bool) -> int:
    """How many lines did not succeed, after saying so by their codes."""
    codes = Counter(row.code for key, row in results.entries.items() if row.code and key in plan.order)
    failed = codes.total()
    if run.pace.done:
        _say(console, f"{run.pace.done} lines in {run.pace.seconds:,.1f} s: {run.pace.speed()}")
    if failed:
        listed = ", ".join(f"{count} {code}" for code, count in codes.most_common())
        _say(
            console,
            f"{failed} of {len(plan.order)} did not succeed: {out} says why ({listed}); "
            f"--retry-failed asks them again",
        )
    if as_json:
        _print_outcome(run, plan, codes)
    return failed


def _print_outcome(run: Run, plan: Survey, codes: Counter[str]) -> None:
    """For programs: of all lines how many succeeded and why the others did not, and what this run did of it."""
    outcome = {
        "lines": len(plan.order),
        "succeeded": len(plan.order) - codes.total(),
        "errors": codes,
        "asked": run.pace.done,
        "seconds": round(run.pace.seconds, 3),
    }
    with printing() as screen:
        screen.file.write(json.dumps(outcome) + "\n")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
