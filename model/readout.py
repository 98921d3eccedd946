"""From hidden states to typed answers. One function for each formula; all numbers are FP32 or wider."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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
