"""`d3serve evaluate`: ask labelled cases, say how good the answers are, compare them with others."""

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from d3serve import __version__
from d3serve.client import Client
from d3serve.client.sending import DEFAULT_URL
from d3serve.commands.ask import find_server
from d3serve.commands.extras import missing, modules_of, needs
from d3serve.commands.options import Key, KeyFile, Url, read_key
from d3serve.commands.submit import submit_file
from d3serve.commands.terminal import messages, printing
from d3serve.errors import InvalidRequest, NoWorker
from d3serve.evaluation.cases import Case, read_cases, read_questions
from d3serve.evaluation.judged import JudgedAnswers, judge, read_results

if TYPE_CHECKING:
    from d3serve.evaluation.report import Report
    from d3serve.evaluation.yes_no import Wanted

SERVER: Final = re.compile(r"https?://", re.IGNORECASE)


@dataclass(frozen=True)
class Asker:
    """Asks the cases of a file, and keeps the answers beside it, so that asking again asks no more."""

    path: Path
    api_key: str | None
    at_once: int
    model: str | None

    def ask(
        self, cases: Sequence[Case], shared: Mapping[str, Any], url: str, kept: Path | None = None
    ) -> JudgedAnswers:
        """The answers of the model that `url` serves now.

        Raises:
            D3ServeError: the server cannot be used, or `kept` holds answers to something else.
        """
        pinned = self._pinned(url)
        out = kept or self._kept(url, shared, pinned)
        requests = ({"custom_id": case.digest, **case.request(), **pinned} for case in cases)
        with tempfile.TemporaryDirectory(prefix="d3serve-evaluate-") as folder:
            asked = Path(folder) / "cases.jsonl"
            asked.write_text("".join(json.dumps(request) + "\n" for request in requests))
            submit_file(
                asked, out, url=url, api_key=self.api_key, at_once=self.at_once, console=messages(),
                retry_failed=True,
            )  # fmt: skip
        messages().print(f"answers are kept in {out}", highlight=False, soft_wrap=True, markup=False)
        return judge(cases, read_results(out), str(out))

    def _pinned(self, url: str) -> dict[str, Any]:
        """What makes a request one to the weights that are served now: jobs that others answered are none of its."""
        find_server(url, self.api_key)
        with Client(url, api_key=self.api_key) as client:
            models = client.models()
        for one in models:
            if self.model in {None, one["name"], *one["aliases"]}:
                name, revision = one["name"], one["revision"]
                weights = {"evaluated": one["identity"]}
                return {
                    "model": f"{name}@{revision}" if revision else name,
                    "job": {"metadata": weights},
                }
        raise NoWorker(f"{url} serves no model yet" if not models else f"{url} does not serve {self.model}")

    def _kept(self, *told: Any) -> Path:
        """Where answers are kept: a file for each server, wording and model. A case more or less changes nothing."""
        digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:8]
        return self.path.with_name(f"{self.path.stem}.answers-{digest}.jsonl")


@dataclass(frozen=True)
class Other:
    """What the answers are compared with: other questions, another server, or answers of earlier."""

    name: str
    questions: Mapping[str, Any] | None = None
    url: str | None = None
    earlier: JudgedAnswers | None = None

    @classmethod
    def find(cls, told: str, cases: Sequence[Case]) -> Self:
        """What `--against` names.

        Raises:
            InvalidRequest: it is none of these.
        """
        from d3serve.evaluation.report import read_report

        if SERVER.match(told):
            return cls(told, url=told)
        path = Path(told)
        if (report := read_report(path)) is not None:
            return cls(told, earlier=report)
        if path.suffix == ".jsonl":
            return cls(told, earlier=judge(cases, read_results(path), told))
        return cls(told, questions=read_questions(path))

    def answers(
        self, asker: Asker, cases: Sequence[Case], shared: Mapping[str, Any], url: str
    ) -> tuple[JudgedAnswers, set[str] | None]:
        """Its answers to the cases, and the questions that differ; None: any may."""
        if self.earlier:
            return self.earlier, None
        if self.questions is None:
            return asker.ask(cases, shared, self.url or url), None
        reworded = {**shared, **self.questions}
        other = read_cases(asker.path, reworded)
        return asker.ask(other, reworded, url), set(self.questions)


def evaluate(
    cases: Annotated[
        Path, typer.Argument(help="JSON Lines with `state`, `questions` and `labels`, or a CSV table.")
    ],
    questions: Annotated[
        Path | None, typer.Option(help="JSON file of questions by name, asked about every case.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Compare with other questions, a server's URL, or an earlier report or answers."),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="File that keeps the answers. Default: one beside the cases.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures and answers as JSON instead of tables.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write one HTML page with plots.")] = None,
    precision: Annotated[
        float, typer.Option(min=0, max=1, help="Precision that a yes/no threshold is chosen for.")
    ] = 0.95,
    recall: Annotated[
        float, typer.Option(min=0, max=1, help="Recall that a yes/no threshold is chosen for.")
    ] = 0.95,
    cost: Annotated[str, typer.Option(help="What a wrong yes and a missed yes cost, as in 5:1.")] = "1:1",
    model: Annotated[
        str | None, typer.Option(help="Which of the server's models. Default: its first.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of jobs in flight.")] = 64,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    api_key_file: KeyFile = None,
) -> None:
    """Measure answers on labelled cases: accuracy, calibration, thresholds; run it again to resume."""
    need_extra()
    from d3serve.evaluation.yes_no import Wanted, read_cost

    wanted = Wanted(precision, recall, *read_cost(cost))
    asker = Asker(cases, read_key(api_key, api_key_file), at_once, model)
    shared = read_questions(questions) if questions else {}
    report = measure(asker, shared, str(questions or cases), against, url, answers, wanted)
    if html:
        _write(html, report)
    _print(report, as_json=as_json)
    raise typer.Exit(1 if report.answers.missing else 0)


def need_extra() -> None:
    """See that what evaluates is installed.

    Raises:
        StartupError: it is not; names the extra.
    """
    if lacking := missing(modules_of("eval")):
        raise needs(lacking)


def measure(
    asker: Asker,
    shared: Mapping[str, Any],
    first: str,
    against: str | None,
    url: str,
    kept: Path | None,
    wanted: "Wanted",
) -> "Report":
    """Ask the cases, and the other side of a comparison if there is one, and count.

    Raises:
        D3ServeError: a file or server cannot be used, or no case has an answer.
    """
    from d3serve.evaluation.report import evaluate as report_on
    from d3serve.evaluation.report import set_against

    cases = read_cases(asker.path, shared)
    other = Other.find(against, cases) if against else None
    found = asker.ask(cases, shared, url, kept)
    if other is None:
        return report_on(str(asker.path), len(cases), found, wanted)
    theirs, reworded = other.answers(asker, cases, shared, url)
    ours = replace(
        found, judged=tuple(each for each in found.judged if not reworded or each.question in reworded)
    )
    compared = set_against(url if other.url else first, ours, other.name, theirs)
    return report_on(str(asker.path), len(cases), found, wanted, compared)


def _write(path: Path, report: "Report") -> None:
    from d3serve.evaluation.page import render

    try:
        path.write_text(render(report, __version__), "utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}", field="html") from None


def _print(report: "Report", *, as_json: bool) -> None:
    from d3serve.commands.evaluation_tables import show

    with printing() as screen:
        if as_json:
            screen.file.write(report.to_json())
        else:
            show(report, screen)
