"""Figures as SVG that stands in a page: its colours are the page's, and no text of a user is in it."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import ScalarFormatter

from d3serve.evaluation.figures import Calibration
from d3serve.evaluation.judged import Judged
from d3serve.evaluation.yes_no import Threshold, sweep

# What matplotlib draws with, and what each becomes in the page, which may be light or dark.
INK, FAINT, ACCENT, SECOND = "#010203", "#040506", "#070809", "#0a0b0c"
_VARIABLES: Final = {
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    ACCENT: "var(--accent)",
    SECOND: "var(--second)",
}
_STYLE: Final[Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "text.parse_math": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": FAINT,
    "grid.linewidth": 0.6, "grid.alpha": 0.3,
    "axes.axisbelow": True, "figure.facecolor": "none", "axes.facecolor": "none",
    "savefig.facecolor": "none", "legend.frameon": False, "path.simplify": True,
}  # fmt: skip


@contextmanager
def _drawing(
    width: float, height: float, rows: Sequence[float] = (1,)
) -> Iterator[tuple[Canvas, list[Axes]]]:
    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(canvas)
        axes = canvas.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=list(rows))
        yield canvas, list(axes[:, 0])


def _svg(canvas: Canvas, name: str, told: str) -> str:
    """The drawing without what a file needs; its ids begin with `name`, for a page holds many drawings."""
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        canvas.savefig(
            file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg ", f'<svg role="img" aria-label="{told}" ', 1)


def reliability(found: Calibration, name: str, *, yes: bool) -> str:
    """How often answers came true by how sure they were, and how many were so sure."""
    said = np.array([each.said for each in found.bins])
    shares = [each.came_true for each in found.bins]
    value = np.array([each.value for each in shares])
    counts = np.array([each.whole for each in shares])
    around = np.array(
        [[each.value - each.low for each in shares], [each.high - each.value for each in shares]]
    )
    with _drawing(4.6, 4.6, (4, 1)) as (canvas, (above, below)):
        above.plot([0, 1], [0, 1], color=FAINT, linestyle="--", linewidth=1.2)
        above.errorbar(
            said, value, yerr=np.maximum(around, 0), fmt="none", ecolor=ACCENT, elinewidth=1, alpha=0.55
        )
        above.scatter(
            said, value, s=16 + 180 * counts / counts.max(), color=ACCENT, linewidths=0, clip_on=False
        )
        above.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        above.set_ylabel("how often yes is true" if yes else "how often it is right")
        below.bar(said, counts, width=0.035, color=ACCENT, alpha=0.55)
        below.set(ylabel="answers", xlabel="probability of yes" if yes else "probability of the answer")
        below.grid(visible=False, axis="x")
        return _svg(canvas, name, "reliability diagram: how often answers came true by how sure they were")


def threshold_curves(judged: Sequence[Judged], chosen: Sequence[Threshold], name: str) -> str:
    """Precision and recall by the threshold, the chosen ones marked; then how yes and no are spread over it."""
    swept = sweep(judged)
    if swept is None:
        return ""
    bins = np.linspace(0, 1, 31)
    with _drawing(4.6, 4.6, (3, 2)) as (canvas, (above, below)):
        above.step(swept.at, swept.precision, where="pre", color=ACCENT, linewidth=1.6, label="precision")
        above.step(swept.at, swept.recall, where="pre", color=SECOND, linewidth=1.6, label="recall")
        for each in chosen:
            if each.at is not None:
                above.axvline(each.at, color=INK, linewidth=0.9, linestyle=":")
        above.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.04))
        above.legend(loc="lower center", ncols=2)
        for truth, colour, told in ((1, ACCENT, "yes is true"), (0, SECOND, "no is true")):
            said = [each.probabilities[1] for each in judged if each.truth == truth]
            below.hist(said, bins=list(bins), color=colour, alpha=0.6, label=told)
        below.set(xlabel="threshold of the probability of yes", ylabel="cases")
        below.set_yscale("symlog", linthresh=1)
        below.set_ylim(bottom=0)
        below.yaxis.set_major_formatter(ScalarFormatter())
        below.legend(loc="upper center", ncols=2)
        return _svg(canvas, name, "precision and recall by threshold, and how yes and no are spread")
