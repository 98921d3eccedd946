"""Questions asked of every row of a pandas or polars frame, the answers as columns of it."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar, cast

from d3serve.client.clients import Client
from d3serve.client.protocol import AT_ONCE
from d3serve.client.questions import Answers, Questions, questions_json
from d3serve.errors import D3ServeError, InvalidRequest
from d3serve.text.strict_json import read_json
from d3serve.text.wording import shown

Frame = TypeVar("Frame")
MAX_DEPTH: Final = 200
ERROR: Final = "error"


def ask_frame(
    frame: Frame,
    state: str | Sequence[str],
    questions: Questions,
    *,
    client: Client | None = None,
    keep: str | os.PathLike[str] | None = None,
    at_once: int = AT_ONCE,
    return_exceptions: bool = False,
    progress: Callable[[int], Any] | None = None,
    **options: Any,
) -> Frame:
    """Ask the questions of every row; return the frame with the answers as further columns.

    A yes/no gives `name` (true or false) and `name_probability` (of yes), a choice `name` (the option) and
    `name_probability` (of it), a score `name` (the expected level, from 0) and `name_level` (the most probable one).
    Rows that are alike are asked once. At most `at_once` jobs are at the server.

    Args:
        frame: a pandas or polars frame, or another that narwhals knows.
        state: the column that holds each row's state, a text or JSON; or the columns that make an object of it.
        questions: by name, as for `Client.ask`.
        client: who asks; one of the environment's server if there is none.
        keep: a file that keeps every answer at once, so that the same call after a crash asks the others alone. It may
            serve several frames: an answer is known by weights, questions and state.
        at_once: how many jobs may be at the server.
        return_exceptions: go on when a row has no answers; they are missing, and the column `error` says why.
        progress: is told after each answer how many rows of those that had to be asked are done.
        options: of each job, as for `Client.submit`.

    Raises:
        InvalidRequest: a column is missing, or there already; a row has no state; `keep` cannot be used; narwhals is
            not installed.
        D3ServeError: a row has no answers, without `return_exceptions`.
    """
    try:
        import narwhals as nw  # noqa: PLC0415 - of an extra
    except ModuleNotFoundError:
        raise InvalidRequest("ask_frame needs narwhals: pip install 'd3serve[eval]'") from None
    rows: Any = nw.from_native(cast("Any", frame), eager_only=True)
    states = _states(rows, state)
    names = _columns(questions_json(questions)) | ({ERROR: "str"} if return_exceptions else {})
    if taken := next((name for name in names if name in rows.columns), None):
        raise InvalidRequest(f"the frame has a column {shown(taken)} already", field="questions")
    with ExitStack() as closed:
        asker = client or closed.enter_context(Client())
        how = {"at_once": at_once, "return_exceptions": return_exceptions, "progress": progress}
        cells = _asked(asker, keep, states, questions, how, options)
    told: Frame = _with_columns(nw, rows, names, cells)
    return told


def _with_columns(nw: Any, rows: Any, names: Mapping[str, str], cells: Sequence[Mapping[str, Any]]) -> Any:
    """The frame with further columns, by narwhals."""
    kinds = {"bool": nw.Boolean, "float": nw.Float64, "str": nw.String}
    space = nw.get_native_namespace(rows)
    columns = [
        nw.new_series(name, [row.get(name) for row in cells], kinds[kind], backend=space)
        for name, kind in names.items()
    ]
    return rows.with_columns(*columns).to_native()


def _asked(
    client: Client,
    keep: str | os.PathLike[str] | None,
    states: Sequence[Any],
    questions: Questions,
    how: Mapping[str, Any],
    options: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The cells of every row's answers: those that are kept, and of the others once of each that are alike."""
    digests = _digests(client, states, questions, options)
    with ExitStack() as closed:
        found, file = _opened(keep, closed)
        missing = {digest: one for digest, one in zip(digests, states, strict=True) if digest not in found}
        answered = client.map(missing.values(), questions, **how, **options)
        for digest, answers in zip(missing, answered, strict=True):
            found[digest] = _cells(answers)
            if file and not isinstance(answers, D3ServeError):
                file.write(json.dumps({"asked": digest, "cells": found[digest]}) + "\n")
                file.flush()
    return [found[digest] for digest in digests]


def _columns(questions: Any) -> dict[str, str]:
    """The columns of the answers, and what they hold."""
    found: dict[str, str] = {}
    for name, question in questions.items():
        match question["type"]:
            case "noul":
                found |= {name: "bool", f"{name}_probability": "float"}
            case "choice":
                found |= {name: "str", f"{name}_probability": "float"}
            case _:
                found |= {name: "float", f"{name}_level": "str"}
    return found


def _cells(answers: Answers | D3ServeError) -> dict[str, Any]:
    """What one row's answers put into these columns."""
    if isinstance(answers, D3ServeError):
        return {ERROR: f"{answers.code}: {answers.message}"}
    cells: dict[str, Any] = {}
    for name, answer in answers.answers.items():
        match answer.type:
            case "noul":
                cells |= {name: answer.yes, f"{name}_probability": answer.probability}
            case "choice":
                cells |= {name: answer.choice, f"{name}_probability": answer.probability}
            case "score":
                cells |= {name: answer.score, f"{name}_level": answer.level}
            case _:
                cells[ERROR] = f"{name}: {answer.code}"
    return cells


def _states(rows: Any, state: str | Sequence[str]) -> list[Any]:
    """Each row's state."""
    wanted = [state] if isinstance(state, str) else list(state)
    if lacking := next((name for name in wanted if name not in rows.columns), None):
        raise InvalidRequest(f"the frame has no column {shown(lacking)}", field="state")
    columns = {name: [_value(value) for value in rows[name].to_list()] for name in wanted}
    if not isinstance(state, str):
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for place, value in enumerate(columns[state]):
        if not isinstance(value, str | dict | list):
            raise InvalidRequest(
                f"row {place} of column {shown(state)} is {shown(value)}: a state is a text or JSON",
                field="state",
            )
    return columns[state]


def _value(value: Any) -> Any:
    """A cell as JSON has it; pandas' missing values are null."""
    missing = (
        value is None or (isinstance(value, float) and math.isnan(value)) or str(value) in {"<NA>", "NaT"}
    )
    return None if missing and not isinstance(value, str) else value


def _digests(
    client: Client, states: Sequence[Any], questions: Questions, options: Mapping[str, Any]
) -> list[str]:
    """What tells each row's request, to the weights that are served now, from all others."""
    weights = sorted(str(one["identity"]) for one in client.models())
    try:
        asked = json.dumps([weights, questions_json(questions), options], default=repr)
        return [hashlib.sha256(f"{asked}{json.dumps(one)}".encode()).hexdigest() for one in states]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a state cannot be written as JSON: {error}", field="state") from None


def _opened(
    keep: str | os.PathLike[str] | None, closed: ExitStack
) -> tuple[dict[str, dict[str, Any]], TextIO | None]:
    """The answers that a file keeps, and the file, ready for more."""
    if keep is None:
        return {}, None
    path = Path(keep)
    try:
        file = closed.enter_context(path.open("a+", encoding="utf-8"))
        file.seek(0)
        text = file.read()
        whole = text[: text.rfind("\n") + 1]  # what a crash cut off goes
        found = dict(_rows(path, whole))
        file.truncate(len(whole.encode()))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot use {path}: {error}", field="keep") from None
    return found, file


def _rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = read_json(line.encode(), max_depth=MAX_DEPTH)
            yield row["asked"], dict(row["cells"])
        except (D3ServeError, KeyError, TypeError, ValueError):
            raise InvalidRequest(
                f"{path} line {number} is no answer that ask_frame kept", field="keep"
            ) from None
