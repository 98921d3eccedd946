"""How good the answers are: accuracy, calibration, sensitivity to order and mask, and simple baselines."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from demo import labels
from demo.index import Package, one_per_source, split
from demo.network import Model
from demo.prompts import Sample, Tokenizing, batch
from demo.questions import OPTIONS, Asked, Asker, draw_state, state_text
from numpy.typing import NDArray

FAMILIES = (
    "section",
    "noul",
    "noul",
    "language",
    "role",
    "interface",
    "summary",
    "name",
    "depends",
    "size",
    "needs",
    "needed",
)
BINS = 15


@dataclass(frozen=True)
class Exam:
    """Held-out questions: every package with its state and what is asked about it; section choices come first."""

    packages: tuple[Package, ...]
    states: tuple[object, ...]
    asked: tuple[tuple[Asked, ...], ...]


def make_exam(packages: Sequence[Package], wanted: str, seed: int, size: int | None = None) -> Exam:
    """One state and its questions for `size` held-out sources (all by default); sections are asked among twelve."""
    pool = [p for p in one_per_source(split(packages, wanted)) if p.section in labels.SECTIONS]  # type: ignore[arg-type]
    asker, rng = Asker(pool), np.random.default_rng(seed)
    if size is not None:
        pool = [pool[int(i)] for i in sorted(rng.choice(len(pool), size=size, replace=False))]
    rows = []
    for package in pool:
        asked = [
            asker.section(package, rng, OPTIONS),
            *(asker.ask(package, family, rng) for family in FAMILIES[1:]),
        ]
        rows.append((package, draw_state(package, rng), tuple(each for each in asked if each is not None)))
    return Exam(*map(tuple, zip(*rows, strict=True)))  # type: ignore[arg-type]


def reversed_choices(exam: Exam) -> Exam:
    """The same exam with the options of every choice in reverse order."""
    asked = tuple(tuple(_reversed(each) for each in row) for row in exam.asked)
    return Exam(exam.packages, exam.states, asked)


def _reversed(each: Asked) -> Asked:
    if each.question.type != "choice":
        return each
    return each.reordered(range(len(each.question.criteria))[::-1])


def tokenized(tokenizing: Tokenizing, exam: Exam) -> list[Sample]:
    """Each package of the exam as the network reads it."""
    return [tokenizing.sample(state, asked) for state, asked in zip(exam.states, exam.asked, strict=True)]


@torch.inference_mode()
def answer(
    model: Model, samples: Sequence[Sample], *, causal: bool = False, rows: int = 8
) -> NDArray[np.float32]:
    """Logits [questions, OPTIONS] in the order of the exam, -inf past a question's last option."""
    device = next(model.parameters()).device
    sizes = [len(sample.blocks) for sample in samples]
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    logits = np.empty((sum(sizes), OPTIONS), dtype=np.float32)
    by_size = sorted(range(len(samples)), key=lambda i: (sizes[i], len(samples[i].state)))
    for group in _groups(by_size, sizes, rows):
        out = model(batch([samples[i] for i in group]).to(device), causal=causal).cpu().numpy()
        for row, i in zip(out, group, strict=True):
            logits[starts[i] : starts[i] + sizes[i]] = row
    return logits


def _groups(order: Sequence[int], sizes: Sequence[int], rows: int) -> list[list[int]]:
    """Runs of at most `rows` with equally many questions."""
    groups: list[list[int]] = []
    for index in order:
        if not groups or len(groups[-1]) == rows or sizes[groups[-1][0]] != sizes[index]:
            groups.append([])
        groups[-1].append(index)
    return groups


def flat(exam: Exam) -> list[Asked]:
    """All questions in order."""
    return [each for row in exam.asked for each in row]


def probabilities(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """Softmax over the options."""
    scaled = logits.astype(np.float64) / temperature
    raised = np.exp(scaled - scaled.max(-1, keepdims=True))
    normal: NDArray[np.float64] = raised / raised.sum(-1, keepdims=True)
    return normal


def negative_log_likelihood(p: NDArray[np.float64], truths: NDArray[np.int64]) -> float:
    """Mean -log p of the true option."""
    return float(-np.log(np.maximum(p[np.arange(len(p)), truths], 1e-12)).mean())


def calibrate(logits: NDArray[np.float32], truths: NDArray[np.int64]) -> float:
    """The temperature with the least negative log-likelihood, to a hundredth."""
    grid = np.arange(0.5, 2.5, 0.01)
    return float(round(min(grid, key=lambda t: negative_log_likelihood(probabilities(logits, t), truths)), 2))


def calibration_error(p: NDArray[np.float64], truths: NDArray[np.int64]) -> float:
    """Expected calibration error of the top option over 15 bins of equal width (Guo et al., 2017)."""
    top, right = p.max(-1), p.argmax(-1) == truths
    bins = np.minimum((top * BINS).astype(int), BINS - 1)
    gaps = [
        abs(right[bins == b].mean() - top[bins == b].mean()) * (bins == b).mean() for b in set(bins.tolist())
    ]
    return float(sum(gaps))


def report(p: NDArray[np.float64], asked: Sequence[Asked]) -> dict[str, dict[str, float]]:
    """Accuracy, NLL and calibration error by family and over all."""
    truths, families = np.array([a.truth for a in asked]), np.array([a.family for a in asked])
    rows = {"all": np.ones(len(asked), dtype=bool)} | {
        name: families == name for name in sorted(set(families.tolist()))
    }
    return {
        name: {
            "questions": int(mask.sum()),
            "accuracy": float((p[mask].argmax(-1) == truths[mask]).mean()),
            "nll": negative_log_likelihood(p[mask], truths[mask]),
            "ece": calibration_error(p[mask], truths[mask]),
        }
        for name, mask in rows.items()
    }


def changed_by_order(
    p: NDArray[np.float64], turned: NDArray[np.float64], asked: Sequence[Asked]
) -> dict[str, float]:
    """Share of choices whose decision differs when the options stand in reverse, by family and over all."""
    families = np.array([a.family for a in asked])
    counts = np.array([len(a.question.criteria) if a.question.type == "choice" else 0 for a in asked])
    changed = p.argmax(-1) != counts - 1 - turned.argmax(-1)
    groups = {"all": counts > 0} | {
        name: families == name for name in sorted(set(families[counts > 0].tolist()))
    }
    return {name: float(changed[mask].mean()) for name, mask in groups.items()}


def baselines(train: Sequence[Package], exam: Exam, seed: int) -> dict[str, NDArray[np.bool_]]:
    """Which section choices come right by the commonest section offered, and by logistic regressions.

    The regressions read the same states, drawn the same way, as bags of words; they choose among the offered
    sections alone.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer  # noqa: PLC0415
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    rng = np.random.default_rng(seed)
    known = [p for p in train if p.section in labels.SECTIONS]
    names = sorted(labels.SECTIONS)
    texts = [state_text(draw_state(p, rng)) for p in known]  # type: ignore[arg-type]
    sections = [names.index(p.section) for p in known]
    asked = [row[0] for row in exam.asked]
    offered = np.array([[_section_of(option, names) for option in a.question.criteria] for a in asked])  # type: ignore[union-attr]
    truths = np.array([a.truth for a in asked])
    held_out = [state_text(state) for state in exam.states]  # type: ignore[arg-type]
    frequency = np.bincount(sections, minlength=len(names))
    right = {"majority": frequency[offered].argmax(-1) == truths}
    for title, bag, strength in (
        ("logistic regression, word counts", CountVectorizer(binary=True, min_df=3), 0.3),
        ("logistic regression, TF-IDF", TfidfVectorizer(sublinear_tf=True, min_df=2), 10.0),
    ):
        words = bag.fit_transform(texts)
        fitted = LogisticRegression(C=strength, max_iter=100).fit(words, sections)
        full = np.full((len(truths), len(names)), -np.inf)
        full[:, fitted.classes_] = fitted.predict_log_proba(bag.transform(held_out))
        right[title] = np.take_along_axis(full, offered, 1).argmax(-1) == truths
    return right


def _section_of(option: str, names: Sequence[str]) -> int:
    return next(i for i, name in enumerate(names) if option in labels.SECTIONS[name][0])
