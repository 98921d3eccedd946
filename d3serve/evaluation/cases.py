"""Labelled cases from a file: what is asked about each state, and which answer is known to be right."""

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from d3serve.errors import D3ServeError, InvalidJSON, InvalidRequest
from d3serve.schemas.questions import (
    ChoiceQuestion,
    Kind,
    NoulQuestion,
    Question,
    ScoreQuestion,
    value_text,
)
from d3serve.text.strict_json import read_json
from d3serve.text.wording import complaint, shown

QUESTIONS: Final[TypeAdapter[dict[str, Question]]] = TypeAdapter(dict[str, Question])
SHOWN: Final = ("state", "images", "videos", "assets")  # what a case is asked about
FIELDS: Final = frozenset({"id", "questions", "labels", *SHOWN})
MAX_DEPTH: Final = 200  # what an API may be set to allow; its own limit is the one that counts
TABLES: Final[Mapping[str, str]] = {".csv": ",", ".tsv": "\t"}
YES_NO: Final[Mapping[str, bool]] = {
    "true": True, "yes": True, "1": True, "false": False, "no": False, "0": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A state with its questions and the right answers, by question, as places among the options.

    `digest` tells what is asked about from that of every other case; a state that comes twice has two.
    """

    number: int
    name: str
    digest: str
    shows: Mapping[str, Any]
    questions: Mapping[str, Mapping[str, Any]]
    labels: Mapping[str, int]
    options: Mapping[str, tuple[str, ...]] = field(repr=False)

    def request(self) -> dict[str, Any]:
        """The body that asks about it."""
        return {"state": "", **self.shows, "questions": self.questions}

    def excerpt(self, most: int = 300) -> str:
        """The beginning of its state."""
        text = value_text(self.shows.get("state", ""))
        return text if len(text) <= most else text[: most - 1] + "…"


def read_cases(path: Path, questions: Mapping[str, Any] | None = None) -> list[Case]:
    """The cases of a file: JSON Lines, or CSV by its ending; `questions` are asked about each, beside its own.

    A line of JSON holds `state`, `labels` by question and, unless all are in `questions`, its own `questions`; also
    `id`, and `images`, `videos` and `assets` as a request has them. A table has the column `state`, a column of
    labels named like each question, and perhaps `id`; further columns are left alone. Where a question stands both
    in the line and in `questions`, that of `questions` is asked: so two wordings are compared.

    Raises:
        InvalidRequest: the file cannot be read, or a line is no case; names the first three such lines.
    """
    shared = dict(questions or {})
    _parsed(shared, "the questions")
    cases: list[Case] = []
    wrong: list[str] = []
    seen: Counter[str] = Counter()
    rows = _table(path, shared) if path.suffix.lower() in TABLES else _lines(path)
    for number, row in rows:
        try:
            if isinstance(row, D3ServeError):
                raise row
            cases.append(_case(number, row, shared, path.parent, seen))
        except D3ServeError as error:
            wrong.append(f"{path} line {number}: {error.message}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise InvalidRequest("; ".join(wrong[:3]) + more, field="cases")
    if not cases:
        raise InvalidRequest(f"{path} holds no case", field="cases")
    return cases


def read_questions(path: Path) -> dict[str, Any]:
    """The questions of a file: a JSON object by name, as in a request.

    Raises:
        InvalidRequest: the file cannot be read, or holds none.
    """
    questions = strict_object(read_file(path), str(path))
    if not questions:
        raise InvalidRequest(f"{path} holds no question", field="questions")
    _parsed(questions, str(path))
    return questions


def read_file(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        InvalidRequest: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="cases") from None


def strict_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in a text, read as strictly as the API reads a body.

    Raises:
        InvalidJSON: it is none.
    """
    try:
        value = read_json(text, max_depth=MAX_DEPTH)
    except InvalidJSON as error:
        raise type(error)(f"{what}: {error.message.replace('the body', 'it', 1)}") from None
    if not isinstance(value, dict):
        raise InvalidJSON(f"{what} is no JSON object")
    return value


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | D3ServeError]]:
    for number, text in enumerate(read_file(path).split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            row = strict_object(text, "the line")
            if unknown := sorted(row.keys() - FIELDS):
                raise InvalidRequest(
                    f"{shown(unknown[0])} is no field of a case: {', '.join(sorted(FIELDS))}"
                )
            yield number, row
        except D3ServeError as error:
            yield number, error


def _table(
    path: Path, questions: Mapping[str, Any]
) -> Iterator[tuple[int, Mapping[str, Any] | D3ServeError]]:
    if not questions:
        raise InvalidRequest(f"{path} is a table: give the questions with --questions", field="questions")
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8: byte {error.start}", field="cases") from None
    csv.field_size_limit(2**31 - 1)  # a state may be longer than the 128 KiB that it is by default
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=TABLES[path.suffix.lower()], strict=True)
    try:
        columns = next(reader, [])
        _check_columns(path, columns, questions)
        start = reader.line_num + 1
        for cells in reader:
            if len(cells) != len(columns) and cells:
                yield start, InvalidRequest(f"has {len(cells)} cells, and the table {len(columns)} columns")
            elif cells:
                row = dict(zip(columns, cells, strict=True))
                labels = {name: row[name] for name in questions if row[name].strip()}
                typed = {name: _typed(questions[name], label) for name, label in labels.items()}
                yield start, {
                    "state": row["state"], "labels": typed, **({"id": row["id"]} if row.get("id") else {})
                }  # fmt: skip
            start = reader.line_num + 1
    except csv.Error as error:
        raise InvalidRequest(f"{path} line {reader.line_num}: {error}", field="cases") from None


def _check_columns(path: Path, columns: list[str], questions: Mapping[str, Any]) -> None:
    for name in ("state", *questions):
        if columns.count(name) != 1:
            told = "no column" if name not in columns else "two columns"
            raise InvalidRequest(f"{path} has {told} {shown(name)}", field="cases")


def _typed(question: Any, label: str) -> str | bool | int:
    """A cell as JSON would say it; what cannot be one stays a text, to be refused as such."""
    text = label.strip()
    if question["type"] == "noul":
        return YES_NO.get(text.lower(), text)
    if question["type"] == "score" and text.isdecimal() and text.isascii():
        levels = [value_text(level) for level in question["criteria"]]
        return text if text in levels else int(text)
    return text if question["type"] == "score" else label


def _parsed(questions: Any, where: str) -> dict[str, Kind]:
    try:
        return dict(QUESTIONS.validate_python(questions))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part not in {"choice", "noul", "score"})
        raise InvalidRequest(f"{where}: {place or 'questions'} {complaint(first)}") from None


def _case(
    number: int, row: Mapping[str, Any], shared: Mapping[str, Any], folder: Path, seen: Counter[str]
) -> Case:
    own, labels, name = row.get("questions", {}), row.get("labels"), row.get("id", f"line {number}")
    for what, value in (("questions", own), ("labels", labels)):
        if not isinstance(value, dict):
            raise InvalidRequest(f"{what} must be an object by question, not {shown(value)}")
    if not isinstance(name, str | int):
        raise InvalidRequest(f"id must be a text or a number, not {shown(name)}")
    asked = {**own, **shared}
    kinds = _parsed(asked, "questions")
    if not labels:
        raise InvalidRequest("labels holds no label")
    if unasked := next((label for label in labels if label not in kinds), None):
        raise InvalidRequest(f"labels.{unasked} is the label of no question: {', '.join(map(shown, kinds))}")
    shows = {field: row[field] for field in SHOWN if field in row}
    if not shows:
        raise InvalidRequest("holds no state")
    content = hashlib.sha256(json.dumps(shows).encode()).hexdigest()[:32]
    seen[content] += 1
    return Case(
        number=number,
        name=str(name),
        digest=f"{content}-{seen[content]}",
        shows=_with_paths(shows, folder),
        questions=asked,
        labels={name: _place(name, kinds[name], label) for name, label in labels.items()},
        options={name: option_names(kinds[name]) for name in labels},
    )


def _with_paths(shows: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Images and videos as of the folder of the file, wherever their request will stand."""
    for name in ("images", "videos"):
        if isinstance(shows.get(name), list):
            shows[name] = [
                str((folder / one).resolve()) if isinstance(one, str) and ":" not in one else one
                for one in shows[name]
            ]
    return shows


def option_names(question: Kind) -> tuple[str, ...]:
    """What the answers to a question can be, in the order of its probabilities."""
    if isinstance(question, ChoiceQuestion):
        return tuple(question.criteria)
    return ("no", "yes") if isinstance(question, NoulQuestion) else tuple(question.options())


def _place(name: str, question: Kind, label: Any) -> int:
    """Which of a question's options a label names."""
    options = option_names(question)
    if isinstance(question, NoulQuestion):
        if isinstance(label, bool):
            return int(label)
        told = "true or false"
    elif isinstance(label, str) and label in options:
        return options.index(label)
    elif isinstance(question, ScoreQuestion):
        if type(label) is int and 0 <= label < len(options):
            if str(label) in options and options.index(str(label)) != label:
                raise InvalidRequest(
                    f"labels.{name} is {label}, a place or a level that reads so: write the level as a text"
                )
            return label
        told = f"the text of a level, or its place from 0 to {len(options) - 1}"
    else:
        told = "one of " + ", ".join(shown(option, 40) for option in options[:12])
        told += f" and {len(options) - 12} more" if len(options) > 12 else ""
    raise InvalidRequest(f"labels.{name} must be {told}, not {shown(label)}")
