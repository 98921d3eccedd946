"""From hidden states to typed answers. One function for each formula; all numbers are FP32 or wider."""

import json
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from d3serve.model.prompt import option_texts
from d3serve.schemas import (
    Answer,
    ChoiceAnswer,
    ChoiceQuestion,
    NoulAnswer,
    NoulQuestion,
    Question,
    ScoreAnswer,
)


def read_probabilities(
    hidden: Tensor, readout: Tensor, options: Sequence[int], temperatures: Sequence[float]
) -> list[list[float] | None]:
    """Probabilities of each question's options: softmax over its first codes, on the device.

    Logits are summed in FP64: a library sums in another order for another number of questions, and in
    FP32 that would show in the seventh digit of an answer.

    Args:
        hidden: [N, hidden] normed hidden state of each question's last row.
        readout: [codes, hidden] FP32.
        options: how many codes each question uses.
        temperatures: what divides each question's logits.

    Returns:
        N lists that each sum to 1 in float64, or None where a number is not finite or all are zero. This waits for
        the device.
    """
    logits = (hidden.double() @ readout.double().T).float()
    device = logits.device
    counts = torch.tensor(options).to(device, non_blocking=True)
    logits = logits / torch.tensor(temperatures, dtype=torch.float32).to(device, non_blocking=True)[:, None]
    unused = torch.arange(logits.shape[1], device=device) >= counts[:, None]
    rows = logits.masked_fill(unused, float("-inf")).softmax(dim=-1).tolist()
    return [_normalised(row[:count]) for row, count in zip(rows, options, strict=True)]


def _normalised(values: list[float]) -> list[float] | None:
    total = math.fsum(values)
    if not math.isfinite(total) or total <= 0:
        return None
    return [value / total for value in values]


def confidence(probabilities: Sequence[float]) -> float:
    """How far a distribution is from even, as the reference runtime counts it: 1 - H(p) / ln n; 1 for one option."""
    if len(probabilities) < 2:
        return 1.0
    entropy = -math.fsum(p * math.log(p) for p in probabilities if p > 0)
    return min(1.0, max(0.0, 1.0 - entropy / math.log(len(probabilities))))


def to_answer(question: Question, probabilities: Sequence[float]) -> Answer:
    """Type an answer: the first most probable option, the probability of yes, or the expected level."""
    if isinstance(question, NoulQuestion):
        return NoulAnswer(noul=probabilities[1])
    if isinstance(question, ChoiceQuestion):
        by_option = dict(zip(question.criteria, probabilities, strict=True))
        return ChoiceAnswer(
            choice=max(by_option, key=by_option.__getitem__),
            probabilities=by_option,
            confidence=confidence(probabilities),
        )
    return ScoreAnswer(
        score=math.fsum(level * p for level, p in enumerate(probabilities)),
        confidence=confidence(probabilities),
        legend={str(level): _legend(text) for level, text in enumerate(question.criteria)},
        probabilities={str(level): p for level, p in enumerate(probabilities)},
    )


def _legend(level: object) -> str:
    if isinstance(level, str):
        return level
    return json.dumps(level, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def option_count(question: Question) -> int:
    """How many codes a question uses."""
    return len(option_texts(question))
