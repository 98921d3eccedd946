"""An evaluation as one HTML page: no script, no other file, no other host; whatever a text holds, it is text."""

import unicodedata
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from d3serve.evaluation.figures import ALL, Confusion, Figures, by_question, swaps
from d3serve.evaluation.paired import verdict
from d3serve.evaluation.plots import reliability, threshold_curves
from d3serve.evaluation.report import Report

MOST_OPTIONS: Final = 16  # of a table of confusion that a screen still shows; of more, the commonest mistakes
MOST_SWAPS: Final = 12
MOST_MISSING: Final = 20


def render(report: Report, version: str) -> str:
    """The page, which names the version that made it."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": percent,
        "number": number,
        "visible": visible,
        "signed": signed,
        "p": p_value,
    }
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    return template.render(
        report=report,
        version=version,
        sections=[_section(report, row, place) for place, row in enumerate(report.figures)],
        most_missing=MOST_MISSING,
        conclusions=_conclusions(report),
        all=ALL,
    )


def _section(report: Report, row: Figures, place: int) -> dict[str, Any]:
    group = by_question(report.answers.judged).get(row.name, [])
    chosen = report.thresholds.get(row.name, ())
    small = row.confusion is not None and len(row.confusion.options) <= MOST_OPTIONS
    return {
        "row": row,
        "anchor": f"q{place}",
        "reliability": reliability(row.calibration, f"r{place}", yes=row.kind == "noul"),
        "curves": threshold_curves(group, chosen, f"t{place}") if chosen else "",
        "thresholds": chosen,
        "confusion": _shaded(row.confusion) if row.confusion and small else None,
        "swaps": swaps(row.confusion, MOST_SWAPS) if row.confusion and not small else [],
    }


def _shaded(found: Confusion) -> dict[str, Any]:
    """Each count with how dark its cell is, from 0 to 100: its share of its row."""
    rows: list[tuple[str, Sequence[tuple[int, int, bool]]]] = []
    for place, (truth, counts) in enumerate(zip(found.options, found.counts, strict=True)):
        whole = max(1, sum(counts))
        rows.append((truth, [(n, round(100 * n / whole), at == place) for at, n in enumerate(counts)]))
    return {"options": found.options, "rows": rows}


def _conclusions(report: Report) -> list[str]:
    against = report.against
    return [verdict(row, against.first, against.second) for row in against.rows] if against else []


def visible(text: Any) -> str:
    """A text without what moves or hides others: control and formatting characters are written out."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in {"Cc", "Cf", "Cs"} or c in "\u200c\u200d"
        else c.encode("unicode_escape").decode()
        for c in str(text)
    )  # fmt: skip


def percent(value: float, digits: int = 1) -> str:
    """A share as people read it."""
    return f"{100 * value:.{digits}f}\u2009%"


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def signed(value: float, digits: int = 3) -> str:
    """A difference with its sign; one that the cases leave open is a question mark."""
    return "?" if value in {float("inf"), float("-inf")} else f"{value:+.{digits}f}".replace("-", "−")


def p_value(value: float) -> str:
    """A p value, no more exact than it was computed."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
