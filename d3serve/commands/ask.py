"""`d3serve ask`: build a request, post it as a job, wait, show the answers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn
from rich.table import Table

from d3serve.client import Client
from d3serve.client.media import media_fields, with_files
from d3serve.client.sending import DEFAULT_URL
from d3serve.commands.counted import show_count
from d3serve.commands.options import Key, KeyFile, Url, read_key
from d3serve.commands.questions import Choice, Questions, Score, YesNo, build_questions, read_object
from d3serve.commands.terminal import bar, messages, plain, printing
from d3serve.errors import InvalidRequest, StorageUnavailable
from d3serve.schemas.questions import Answer

ANSWER: Final[TypeAdapter[Answer]] = TypeAdapter(Answer)
FIRST_CONTACT_S: Final = (
    0.5  # a server that restarts is missed for less; nobody who is not there is worth more
)

COUNT_PATIENCE_S: Final = 5.0  # a server without a worker says so after ten seconds, and is asked once more


def ask(
    request: Annotated[Path | None, typer.Argument(help="A JSON file with `state` and `questions`.")] = None,
    state: Annotated[str | None, typer.Option(help="The state, as text.")] = None,
    yes_no: YesNo = None,
    choice: Choice = None,
    score: Score = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="An image that the state shows; repeatable.")
    ] = None,
    video: Annotated[
        list[Path] | None, typer.Option(help="A video that the state shows; repeatable.")
    ] = None,
    questions: Questions = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the finished job as JSON instead of a table.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count tokens, say what would be refused, and send no job.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    api_key_file: KeyFile = None,
) -> None:
    """Ask a running server: post a job, wait for it and print the answers."""
    shown = media_fields(image or (), video or ())
    if shown and state is None:
        state = ""  # it is what it shows
    flags = state is not None or yes_no or choice or score or questions is not None
    if request and flags:
        raise InvalidRequest("give a request file or --state with questions, not both", field="request")
    body = (
        with_files(read_object(request, field="request"), request.parent)
        if request
        else build_request(state, yes_no or (), choice or (), score or (), questions) | shown
    )
    key = read_key(api_key, api_key_file)
    if dry_run:
        find_server(url, key)
        with Client(url, api_key=key, patience_s=COUNT_PATIENCE_S) as client:
            raise typer.Exit(0 if show_count(client.count_body(body), as_json=as_json) else 1)
    job = post(url, body, api_key=key, console=messages())
    succeeded = show_json(job) if as_json else show_table(job)
    raise typer.Exit(0 if succeeded else 1)


def build_request(
    state: str | None,
    yes_no: Sequence[str],
    choice: Sequence[str],
    score: Sequence[str],
    questions: str | None = None,
) -> dict[str, Any]:
    """A System One body from command-line arguments.

    Raises:
        InvalidRequest: no state, no question, or one that `build_questions` refuses.
        InvalidJSON: `questions` is no strict JSON object.
    """
    if state is None:
        raise InvalidRequest("give a request file, or --state and at least one question", field="state")
    found = build_questions(yes_no, choice, score, questions)
    if not found:
        raise InvalidRequest("ask something: --yes-no, --choice, --score or --questions", field="questions")
    return {"state": state, "questions": found}


def find_server(url: str, api_key: str | None) -> None:
    """See that a d3serve server answers at `url`, at once and before anything is sent to it.

    Raises:
        StorageUnavailable: nobody does; says how to start one.
        InternalError: another server does.
    """
    with Client(url, api_key=api_key, patience_s=FIRST_CONTACT_S) as client:
        try:
            client.ping()
        except StorageUnavailable as error:
            raise StorageUnavailable(
                f"{error.message}. Start a server with `d3serve up --model checkpoints/demo-d3` (or a model of your "
                "own), or name one with --url"
            ) from None


def post(url: str, body: Mapping[str, Any], *, api_key: str | None, console: Console) -> dict[str, Any]:
    """Post `body` as a job to the server at `url` and return the job when it is done.

    Raises:
        D3ServeError: the server refused it or cannot be reached.
    """
    find_server(url, api_key)
    columns = ("{task.description}", BarColumn(), "{task.fields[left]}")
    with Client(url, api_key=api_key) as client, bar(console, *columns) as progress:
        line = progress.add_task(f"waiting for {plain(url)}", total=None, left="")
        job = client.submit_body(body)
        for event in client.events(job.id):
            fraction, left = told_progress(event.data)
            total = 1 if fraction else None  # of what has no share yet, the bar only shows that it waits
            progress.update(line, description=plain(event.name), completed=fraction, total=total, left=left)
        return dict(client.get(job.id).raw)


def told_progress(data: Any) -> tuple[float, str]:
    """The share of its work that a running job has done, as an event tells it, and what a person reads beside a bar."""
    told = data if isinstance(data, Mapping) else {}
    fraction, eta_s = told.get("fraction"), told.get("eta_s")
    if not isinstance(fraction, int | float):
        return 0.0, ""
    left = f", {eta_s:.0f} s left" if isinstance(eta_s, int | float) else ""
    return min(max(float(fraction), 0.0), 1.0), f"{fraction:.0%}{left}"


def show_json(job: Mapping[str, Any]) -> bool:
    """Print a finished job as the API tells it; true if it succeeded."""
    with printing() as console:
        unicode = console.encoding.startswith("utf")
        console.file.write(json.dumps(job, indent=2, ensure_ascii=not unicode) + "\n")
    return bool(job["status"] == "succeeded")


def show_table(job: Mapping[str, Any], truths: Mapping[str, str] | None = None) -> bool:
    """Print a finished job as people read it; true if it succeeded."""
    with printing() as screen:
        return show(job, screen, truths)


def show(job: Mapping[str, Any], console: Console, truths: Mapping[str, str] | None = None) -> bool:
    """Print a finished job as a table of answers and a line of usage; true if it succeeded.

    With `truths`, the known answer of each question stands beside the model's.
    """
    if job["status"] != "succeeded":
        error = job.get("error") or {}
        reason = f": {error['message']}" if error else ""
        console.print(
            f"[red]{plain(job['status'])}[/red] {plain(error.get('code', '') + reason)}",
            highlight=False,
            soft_wrap=True,
        )
        return False
    result = job["result"]
    table = Table(title=plain(result["model"]))
    for column in ("question", "answer", "probability", "confidence", *(["truth"] if truths else [])):
        table.add_column(column, overflow="fold")  # never cut
    for name, answer in result["answers"].items():
        table.add_row(plain(name), *_row(answer), *([truths[name]] if truths else []))
    console.print(table)
    usage = result["usage"]
    console.print(
        f"{usage['input_tokens']} input tokens, {usage['computed_tokens']} computed; "
        f"state of {usage['state_tokens']} tokens {'from the cache' if usage['state_cached'] else 'read once'}"
    )
    return True


def _row(answer: Mapping[str, Any]) -> tuple[str, str, str]:
    try:
        row = ANSWER.validate_python(answer).row()
    except ValidationError:  # of a server newer than this command
        return (plain(json.dumps(answer, ensure_ascii=False)), "", "")
    text = plain(row.answer)
    style = "[red]{}[/red]" if answer["type"] == "error" else "{}"
    return (style.format(text), _share(row.probability), _share(row.confidence))


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.3f}"
