"""What `d3serve submit` does: many jobs from a file of JSON lines, results into another, resumable."""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from d3serve.client import AsyncClient
from d3serve.errors import D3ServeError, InvalidRequest


def submit_file(
    requests: Path, out: Path, *, url: str, api_key: str | None, at_once: int, console: Console
) -> int:
    """Submit every line of `requests` that has no result in `out` yet; return how many have failed in all.

    A job's key follows from its line, so a line that was submitted just before a crash finds its job again.

    Raises:
        InvalidRequest: a file cannot be read or written, a line is no JSON object, or a result belongs to another
            request than the one on its line; names the line.
        StorageUnavailable: the server went away; run it again to go on.
    """
    lines, known = read_lines(requests), read_results(out)
    for number, row in known.items():
        if number not in lines or row["request"] != _digest(number, lines[number]):
            raise InvalidRequest(
                f"{out} holds the result of another request for line {number}: give {requests} an --out of its own",
                field="out",
            )
    failed = sum(1 for row in known.values() if row["status"] != "succeeded")
    waiting = [number for number in lines if number not in known]
    try:
        file = out.open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {out}: {error.strerror}", field="out") from None
    with file:
        try:
            failed += asyncio.run(_submit_all(lines, waiting, file, url, api_key, at_once, console))
        except ExceptionGroup as group:  # of the same trouble, many times over
            raise group.exceptions[0] from None
    if failed:
        console.print(
            f"{failed} of {len(lines)} did not succeed: {out} says why", highlight=False, soft_wrap=True
        )
    return failed


def read_lines(path: Path) -> dict[int, dict[str, Any]]:
    """The JSON objects of a file, by line number."""
    texts = _text(path, "requests").split("\n")
    found: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(f"{path} line {number}: {error}", field="requests") from None
        if not isinstance(value, dict):
            raise InvalidRequest(f"{path} line {number}: holds no JSON object", field="requests")
        found[number] = value
    return found


def read_results(path: Path) -> dict[int, dict[str, Any]]:
    """The results that stand in a file already, by line number; a last line cut off by a crash does not count."""
    found: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return found
    text = _text(path, "out")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text, "utf-8")
    for line in text.split("\n")[:-1]:
        try:
            row = json.loads(line)
            found[int(row["line"])] = {"request": row["request"], "status": row["status"], **row}
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest(f"{path} holds a line that is no result of ours", field="out") from None
    return found


def _text(path: Path, field: str) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field=field) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}", field=field
        ) from None


def _digest(number: int, body: Mapping[str, Any]) -> str:
    """What makes a line the one that it is: its place and its request."""
    return hashlib.sha256(json.dumps([number, body]).encode()).hexdigest()


async def _submit_all(
    lines: Mapping[int, Mapping[str, Any]],
    waiting: list[int],
    file: IO[str],
    url: str,
    api_key: str | None,
    at_once: int,
    console: Console,
) -> int:
    gate, failed = asyncio.Semaphore(at_once), 0
    columns = (
        "[progress.description]{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("jobs", total=len(lines), completed=len(lines) - len(waiting))
        async with AsyncClient(url, api_key=api_key) as client, asyncio.TaskGroup() as group:

            async def one(number: int) -> None:
                nonlocal failed
                async with gate:
                    row = await _row(client, number, lines[number])
                failed += row["status"] != "succeeded"
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                progress.advance(bar)

            for number in waiting:
                group.create_task(one(number))
    return failed


async def _row(client: AsyncClient, number: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """One line's outcome. What the server refuses for good is an outcome; a server that is away is not."""
    digest = _digest(number, body)
    row: dict[str, Any] = {"line": number, "request": digest}
    try:
        job = await client.wait((await client.submit_body(body, idempotency_key=f"submit-{digest}")).id)
    except D3ServeError as error:
        if error.retryable:
            raise
        refusal = {"code": error.code, "message": error.message}
        return {**row, "id": None, "status": "refused", "error": refusal}
    row |= {"id": job.id, "status": job.status}
    return row | ({"result": job.result} if job.result is not None else {"error": job.error})
