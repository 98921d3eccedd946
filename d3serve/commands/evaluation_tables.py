"""An evaluation as tables on a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from d3serve.commands.terminal import plain
from d3serve.evaluation.figures import Figures, Share, swaps
from d3serve.evaluation.paired import verdict
from d3serve.evaluation.report import Against, Report
from d3serve.evaluation.yes_no import Threshold

MOST_SWAPS = 3  # of a question; the page and the JSON have all
MOST_WORST = 5
MOST_MISSING = 3
KINDS = {"noul": "yes/no", "all": ""}


def show(report: Report, console: Console) -> None:
    """Print what a person decides by."""
    console.print(_figures(report))
    for row in report.figures:
        _notes(row, report.thresholds.get(row.name, ()), console)
    if report.worst:
        console.print(_worst(report))
    if report.against:
        _against(report.against, console)
    if missing := report.answers.missing:
        told = plain("; ".join(missing[:MOST_MISSING]))
        console.print(f"[red]{len(missing)} without an answer[/red], left out: {told}", soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")  # never cut
    return table


def _figures(report: Report) -> Table:
    title = f"{report.number} cases, answered by {plain(', '.join(report.answers.models))}"
    table = _table(
        title, "question", "kind", "answers", "accuracy (95 %)", "commonest", "log loss", "Brier", "ECE"
    )
    for row in report.figures:
        calibration = row.calibration
        table.add_row(
            plain(row.name), KINDS.get(row.kind, row.kind), str(row.accuracy.whole), _interval(row.accuracy),
            f"{row.commonest:.1%}", f"{row.log_loss:.3f}", f"{row.brier:.3f}",
            f"{calibration.error:.3f}" + (" (chance)" if calibration.error <= calibration.by_chance else ""),
        )  # fmt: skip
    table.caption = "ECE with (chance): no more than perfectly calibrated answers have by chance"
    table.caption_justify = "left"
    return table


def _interval(share: Share) -> str:
    return f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%})"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _notes(row: Figures, chosen: Sequence[Threshold], console: Console) -> None:
    name = plain(row.name)
    if row.levels:
        far = row.levels
        console.print(
            f"{name}: expected level off by {far.mean_absolute_error:.2f} (always the median: "
            f"{far.error_of_median:.2f}), bias {far.bias:+.2f}, within one level {far.within_one.value:.1%}"
        )
    mistakes = swaps(row.confusion, MOST_SWAPS) if row.confusion and row.kind == "choice" else ()
    for truth, answer, times in mistakes:
        console.print(f"{name}: {plain(truth)} answered as {plain(answer)}: {times}", soft_wrap=True)
    if chosen:
        console.print(_thresholds(name, chosen))
    elif row.separation:
        console.print(f"{name}: labels are all yes or all no, so no threshold can be chosen")


def _thresholds(name: str, chosen: Sequence[Threshold]) -> Table:
    table = _table(
        f"{name}: thresholds", "wanted", "yes from", "precision", "recall", "wrong yes", "missed yes", "cost"
    )
    for each in chosen:
        if each.at is None or each.precision is None or each.recall is None:
            table.add_row(each.wanted, "never" if each.wanted.startswith("least") else "none reaches it")
            continue
        table.add_row(
            each.wanted, f"{each.at:.3f}", _interval(each.precision), _interval(each.recall),
            str(each.wrong_yes), str(each.missed_yes), f"{each.cost:g}",
        )  # fmt: skip
    return table


def _worst(report: Report) -> Table:
    table = _table("The worst answers", "case", "question", "true", "answered", "p of the truth")
    for each in report.worst[:MOST_WORST]:
        table.add_row(
            plain(each.case), plain(each.question), plain(each.options[each.truth]),
            plain(each.options[each.decision]), f"{each.probabilities[each.truth]:.2g}",
        )  # fmt: skip
    return table


def _against(against: Against, console: Console) -> None:
    first, second = plain(against.first), plain(against.second)
    table = _table(
        f"{first} against {second}",
        "question", "answers", "accuracy", "only first / second right", "p", "log loss", "p", "conclusion",
    )  # fmt: skip
    for row in against.rows:
        accuracy, loss = row.accuracy, row.log_loss
        table.add_row(
            plain(row.name), str(row.answers), f"{accuracy.first:.1%} → {accuracy.second:.1%}",
            f"{row.first_only} / {row.second_only}", _p(accuracy.p),
            f"{loss.first:.3f} → {loss.second:.3f}", _p(loss.p),
            plain(verdict(row, against.first, against.second)),
        )  # fmt: skip
    console.print(table)
    console.print(f"[bold]{plain(against.verdict)}[/bold]", soft_wrap=True)
    if against.missing:
        console.print(f"[red]{against.missing} have no answer from {second}[/red], not compared")
