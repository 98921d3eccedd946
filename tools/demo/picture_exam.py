"""Questions about new drawings, answered by an engine as files are, and how good the answers are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from demo.measure import calibration_error, negative_log_likelihood
from demo.picture_prompts import STATES, Asked, ask
from demo.pictures import WORDS, draw
from demo.questions import Rng

from d3serve.media.sizes import image_size
from d3serve.model.engine import DecisionEngine
from d3serve.model.media import Medium
from d3serve.model.resize import resized

SIDES = (240, 400)  # least and most pixels of a drawing's sides
TOGETHER = 8  # drawings of one turn


@dataclass(frozen=True)
class Answered:
    """A question about a drawing, and the probability of each of its options."""

    asked: Asked
    probabilities: tuple[float, ...]


def sit(
    engine: DecisionEngine, rng: Rng, pictures: int, *, held_out: bool, offered: int = 4
) -> list[Answered]:
    """Ask everything about new drawings, of pairs that are held out or of others; sizes and states are of chance."""
    answered = []
    for first in range(0, pictures, TOGETHER):
        jobs, asked = [], []
        for number in range(first, min(first + TOGETHER, pictures)):
            drawing = draw(rng, *map(int, rng.integers(*SIDES, size=2)), held_out=held_out)
            each = {name: ask(name, word, rng, offered=offered) for name, word in drawing.truths.items()}
            height, width, _ = drawing.pixels.shape
            frame = resized(drawing.pixels, *image_size(width, height))
            medium = Medium("image", f"{held_out} {number}", frame[None])
            state = STATES[int(rng.integers(len(STATES)))]
            jobs.append(
                engine.prepare(state, {name: one.question for name, one in each.items()}, media=[medium])
            )
            asked.append(each)
        for each, decided in zip(asked, engine.decide(jobs), strict=True):
            for name, answer in decided.answers.items():
                answered.append(Answered(each[name], tuple(answer.probabilities.values())))  # type: ignore[union-attr]
    return answered


def report(answered: Mapping[str, Sequence[Answered]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Of each group and all of them, by what was asked and over all: accuracy, its interval of 95 %, NLL, ECE."""
    groups = {**answered, "all": [one for each in answered.values() for one in each]}
    return {
        group: {
            name: _scores([one for one in each if name in ("all", one.asked.name)])
            for name in ("all", *WORDS)
        }
        for group, each in groups.items()
    }


def _scores(answered: Sequence[Answered]) -> dict[str, Any]:
    p = np.array([one.probabilities for one in answered])
    truths = np.array([one.asked.truth for one in answered])
    right, count = int((p.argmax(-1) == truths).sum()), len(truths)
    return {
        "questions": count,
        "accuracy": right / count,
        "interval": wilson(right, count),
        "confidence": float(p.max(-1).mean()),
        "nll": negative_log_likelihood(p, truths),
        "ece": calibration_error(p, truths),
    }


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share."""
    share, extra = right / count, z * z / count
    middle = (share + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(share * (1 - share) / count + extra / count / 4)
    return middle - half, middle + half
