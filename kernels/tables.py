"""Small tables of a pass, on their way to the device together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LINE_BYTES = 128  # every table starts on a line, so Triton specialises its pointer once


def upload(
    tables: Sequence[NDArray[Any]],
    dtype: torch.dtype,
    device: torch.device | str,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """One tensor that holds all tables, and a view of it for each, of its own shape or, filled up with zeros, a larger.

    They cross in one copy, from pinned memory where there is a GPU, and nobody waits for it: the device's stream orders
    what comes after.
    """
    shapes = [each.shape for each in tables] if shapes is None else shapes
    line = LINE_BYTES // dtype.itemsize
    counts = [int(np.prod(shape)) for shape in shapes]
    begins = np.cumsum([0, *(-(-count // line) * line for count in counts)]).tolist()
    host = torch.zeros(begins[-1], dtype=dtype, pin_memory=torch.device(device).type == "cuda")
    flat = host.numpy()
    for begin, each in zip(begins, tables, strict=False):
        flat[begin : begin + each.size] = each.ravel()
    table = host.to(device, non_blocking=True)
    places = zip(begins, counts, shapes, strict=False)
    return table, [table[begin : begin + count].view(shape) for begin, count, shape in places]
