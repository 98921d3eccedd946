"""What `d3serve ask` does: build a request, post it as a job, wait, show the answers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from d3serve.client import Client
from d3serve.errors import InvalidRequest

NAME_CHARS: Final = 200  # a question is named by its text, and a name may have 256


def build_request(
    state: str | None, yes_no: Sequence[str], choice: Sequence[str], score: Sequence[str]
) -> dict[str, Any]:
    """A System One body from command-line arguments; `choice` and `score` read `question: a | b | c`.

    Raises:
        InvalidRequest: no state, no question, one without options, or one asked twice.
    """
    if state is None:
        raise InvalidRequest("give a request file, or --state and at least one question", field="state")
    asked: list[tuple[str, dict[str, Any]]] = [(text, {"type": "noul"}) for text in yes_no]
    for text in choice:
        instructions, options = _options(text)
        asked.append((instructions, {"type": "choice", "criteria": dict.fromkeys(options)}))
    for text in score:
        instructions, options = _options(text)
        asked.append((instructions, {"type": "score", "criteria": options}))
    questions: dict[str, Any] = {}
    for instructions, question in asked:
        name = instructions if len(instructions) <= NAME_CHARS else instructions[: NAME_CHARS - 1] + "…"
        if name in questions:
            raise InvalidRequest(f"{name!r} is asked twice", field="questions")
        questions[name] = {**question, "instructions": instructions}
    if not questions:
        raise InvalidRequest("ask something: --yes-no, --choice or --score", field="questions")
    return {"state": state, "questions": questions}


def _options(text: str) -> tuple[str, list[str]]:
    instructions, colon, listed = text.rpartition(":")
    options = [part.strip() for part in listed.split("|")]
    if not colon or len(options) < 2:
        raise InvalidRequest(f"{text!r}: write 'question: option | option'", field="questions")
    return instructions.strip(), options


def read_request(path: Path) -> dict[str, Any]:
    """The JSON object in a request file.

    Raises:
        InvalidRequest: the file is missing or holds no JSON object.
    """
    try:
        body = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="request") from None
    except ValueError as error:
        raise InvalidRequest(f"{path} holds no JSON: {error}", field="request") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"{path} holds no JSON object", field="request")
    return body


def ask(url: str, body: Mapping[str, Any], *, api_key: str | None, console: Console) -> dict[str, Any]:
    """Post `body` as a job to the server at `url` and return the job when it is done.

    Raises:
        D3ServeError: the server refused it or cannot be reached.
    """
    with Client(url, api_key=api_key) as client, console.status(f"waiting for {url}") as line:
        job = client.submit_body(body)
        for event in client.events(job.id):
            line.update(event.name)
        return dict(client.get(job.id).raw)


def show(job: Mapping[str, Any], console: Console, truths: Mapping[str, str] | None = None) -> bool:
    """Print a finished job as a table of answers and a line of usage; true if it succeeded.

    With `truths`, the known answer of each question stands beside the model's.
    """
    if job["status"] != "succeeded":
        error = job.get("error") or {}
        reason = f": {error['message']}" if error else ""
        console.print(
            f"[red]{job['status']}[/red] {error.get('code', '')}{escape(reason)}",
            highlight=False,
            soft_wrap=True,
        )
        return False
    result = job["result"]
    table = Table("question", "answer", "probability", "confidence", title=escape(result["model"]))
    if truths:
        table.add_column("truth")
    for name, answer in result["answers"].items():
        table.add_row(escape(name), *_row(answer), *([truths[name]] if truths else []))
    console.print(table)
    usage = result["usage"]
    console.print(
        f"{usage['input_tokens']} input tokens, {usage['computed_tokens']} computed; "
        f"state of {usage['state_tokens']} tokens {'from the cache' if usage['state_cached'] else 'read once'}"
    )
    return True


def _row(answer: Mapping[str, Any]) -> tuple[str, str, str]:
    match answer["type"]:
        case "noul":
            return ("yes" if answer["noul"] >= 0.5 else "no", f"{answer['noul']:.3f}", "")
        case "choice":
            best = answer["choice"]
            return (escape(best), f"{answer['probabilities'][best]:.3f}", f"{answer['confidence']:.3f}")
        case "score":
            level = max(answer["probabilities"], key=answer["probabilities"].__getitem__)
            shown = f"{answer['score']:.2f} ({answer['legend'][level]})"
            return (escape(shown), f"{answer['probabilities'][level]:.3f}", f"{answer['confidence']:.3f}")
        case _:
            return (f"[red]{answer['error']['code']}[/red]", "", "")
