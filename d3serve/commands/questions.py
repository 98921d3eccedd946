"""Questions as the flags of `ask` and `submit` say them."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from d3serve.errors import InvalidJSON, InvalidRequest
from d3serve.text.strict_json import read_json

NAME_CHARS: Final = 200  # a question is named by its text, and a name may have 256
MAX_DEPTH: Final = 200  # what an API may be set to allow; its own limit is the one that counts
# Where a question may end: a colon before a blank, so that 9:30, C:\\ and https:// are none; or a full-width one.
_COLON: Final = re.compile(r"(?<!\\):(?=\s|$)|(?<!\\)：")
_BAR: Final = re.compile(r"(?<!\\)\|")
_ESCAPED: Final = re.compile(r"\\([:|：])")

YesNo = Annotated[list[str] | None, typer.Option(help="A yes/no question; repeatable.")]
Choice = Annotated[
    list[str] | None,
    typer.Option(help=r"A choice: 'question: option | option'; repeatable. \: and \| are plain characters."),
]
Score = Annotated[
    list[str] | None, typer.Option(help="A score: 'question: lowest | … | highest'; repeatable.")
]
Questions = Annotated[
    str | None,
    typer.Option(
        metavar="JSON|FILE",
        help="Questions as the HTTP API has them: a JSON object, by name, or a file of one.",
    ),
]


def build_questions(
    yes_no: Sequence[str], choice: Sequence[str], score: Sequence[str], questions: str | None = None
) -> dict[str, Any]:
    """The `questions` of a request; `choice` and `score` read `question: a | b | c`.

    Raises:
        InvalidRequest: a question is empty or asked twice, or its options are missing, empty, doubled or could be
            others; or the file of `questions` cannot be read.
        InvalidJSON: `questions` holds no strict JSON object.
    """
    asked: list[tuple[str, dict[str, Any]]] = [(text, {"type": "noul"}) for text in yes_no]
    asked += [_asked("choice", text) for text in choice]
    asked += [_asked("score", text) for text in score]
    found = {} if questions is None else _given(questions)
    for instructions, question in asked:
        if not instructions.strip():
            raise InvalidRequest("a question is empty", field="questions")
        name = instructions if len(instructions) <= NAME_CHARS else instructions[: NAME_CHARS - 1] + "…"
        if name in found:
            raise InvalidRequest(f"{name!r} is asked twice", field="questions")
        found[name] = {**question, "instructions": instructions}
    return found


def _given(questions: str) -> dict[str, Any]:
    if questions.lstrip()[:1] in ("{", "["):
        return json_object(questions.encode(errors="replace"), "--questions")
    return read_object(Path(questions), field="questions")


def _asked(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """The question in `question: a | b`. Where it could end in two places, none is guessed."""
    head, *rest = _BAR.split(text)
    ends = list(_COLON.finditer(head))
    if not rest or not ends:
        raise InvalidRequest(f"{text!r}: write 'question: option | option'", field="questions")
    readings = []
    for end in ends:
        options = [_ESCAPED.sub(r"\1", part.strip()) for part in (head[end.end() :], *rest)]
        criteria = dict.fromkeys(options) if kind == "choice" else options
        name = _ESCAPED.sub(r"\1", head[: end.start()].strip())
        readings.append((name, {"type": kind, "criteria": criteria}))
    if len(readings) > 1:
        raise InvalidRequest(_which_colon(text, ends, readings[0]), field="questions")
    if "" in options:
        raise InvalidRequest(f"{text!r}: one of the options is empty", field="questions")
    if doubled := next((option for option in options if options.count(option) > 1), None):
        raise InvalidRequest(f"{text!r}: {doubled!r} stands twice among the options", field="questions")
    return readings[0]


def _which_colon(text: str, ends: Sequence[re.Match[str]], first: tuple[str, Mapping[str, Any]]) -> str:
    name, question = first
    explicit = json.dumps({name: {**question, "instructions": name}}, ensure_ascii=False)
    after = ends[0].end()
    escaped = text[:after] + _COLON.sub(lambda colon: "\\" + colon[0], text[after:])
    return (
        f"{text!r}: the question may end at any of {len(ends)} colons; write \\: for one that ends none, as in "
        f"{shlex.quote(escaped)}, or say it with --questions {shlex.quote(explicit)}"
    )


def read_object(path: Path, *, field: str) -> dict[str, Any]:
    """The JSON object in a file, read as strictly as the API reads a body; a byte order mark is no part of it.

    Raises:
        InvalidRequest: the file cannot be read.
        InvalidJSON: it holds no strict JSON object.
    """
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or "it is no path"
        raise InvalidRequest(f"cannot read {path}: {told}", field=field) from None
    return json_object(content.removeprefix(b"\xef\xbb\xbf"), str(path))


def json_object(content: bytes, source: str) -> dict[str, Any]:
    """The JSON object in a text. Raises InvalidJSON if there is none; says so of `source`."""
    try:
        value = read_json(content, max_depth=MAX_DEPTH)
    except InvalidJSON as error:
        reason = error.message.replace("the body", "it", 1)
        raise type(error)(f"{source} holds no JSON that can be sent: {reason}") from None
    if not isinstance(value, dict):
        raise InvalidJSON(f"{source} holds no JSON object")
    return value
