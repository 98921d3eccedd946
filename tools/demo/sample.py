"""A few hundred held-out packages with questions and truths, as one file for tests and benchmarks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from demo.index import SOURCE
from demo.measure import Exam
from demo.questions import Asked
from numpy.typing import NDArray

LICENCE = (
    "Package descriptions and labels were written by Debian's maintainers and reviewers; each package's own free "
    "licence (Debian Free Software Guidelines) covers its metadata. Questions and their wording: Apache-2.0."
)
ALWAYS, DRAWN = 3, 2  # questions of every package: the section and two yes/no ones; others drawn


def write_sample(
    exam: Exam, baselines: Mapping[str, NDArray[np.bool_]], size: int, seed: int, path: Path
) -> None:
    """Write `size` packages of the exam, one a line, each with five questions in the wire's form.

    `baselines` says which of the exam's section choices come right by simpler means; the file's first line tells
    how many of those that it holds do.
    """
    rng = np.random.default_rng(seed)
    chosen = sorted(rng.choice(len(exam.packages), size=size, replace=False).tolist())
    lines = [json.dumps(_row(exam, index, rng), ensure_ascii=False) for index in chosen]
    simpler = {name: round(float(right[chosen].mean()), 4) for name, right in baselines.items()}
    head = {"source": SOURCE, "licence": LICENCE, "section_accuracy_of_baselines": simpler}
    path.write_text("\n".join([json.dumps(head, ensure_ascii=False), *lines]) + "\n", encoding="utf-8")


def _row(exam: Exam, index: int, rng: np.random.Generator) -> dict[str, Any]:
    asked = exam.asked[index]
    others = rng.permutation(range(ALWAYS, len(asked)))[:DRAWN]
    kept = [*asked[:ALWAYS], *(asked[int(number)] for number in sorted(others))]
    names = [f"{number}-{each.family}" for number, each in enumerate(kept)]
    return {
        "package": exam.packages[index].name,
        "state": exam.states[index],
        "questions": {
            name: each.question.model_dump(mode="json") for name, each in zip(names, kept, strict=True)
        },
        "truths": {name: _truth(each) for name, each in zip(names, kept, strict=True)},
    }


def _truth(asked: Asked) -> str | bool | int:
    """An option's name, yes or no, or a level."""
    if asked.question.type == "choice":
        return list(asked.question.criteria)[asked.truth]
    return bool(asked.truth) if asked.question.type == "noul" else asked.truth
