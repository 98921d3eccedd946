"""FP32 passes at the speed of BF16 tensor cores: operands split into BF16 parts, whose products are summed in FP32.

Three parts hold every bit of an FP32 number and BF16 weights need one, so products with weights multiply exactly and
only their sums are rounded. Queries, keys, values and attention's weights are split in two, and the product of the two
small parts is left out: some 2^-17 of each number, where BF16 leaves 2^-9. `exact(..., split=True)` is a pass of these,
and `long_attention.py` shows how far its answers are from the plain FP32's.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

import torch
from rounding import Both, RoundedOperations
from torch import Tensor

from d3serve.kernels.matrix import Matrix, Rows, StackedMatrix
from d3serve.kernels.segments import Segment

STEP_ROWS = 16_384  # of a product with weights: bounds the parts of its operand
SCORES = 2**29  # in one step of attention: 2 GB, and as much again for their weights


def split(x: Tensor, count: int) -> list[Tensor]:
    """X as a sum of `count` BF16 tensors, the largest first."""
    parts: list[Tensor] = []
    for _ in range(count):
        x = x.float() if not parts else x - parts[-1]  # exact: what a rounding leaves has fewer bits
        parts.append(x.bfloat16())
    return parts


def product(a: Tensor, b: Tensor) -> Tensor:
    """The FP32 product of BF16 matrices."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def split_linear(x: Rows, weight: Matrix, out: Tensor | None = None) -> Tensor:
    """Multiply FP32 rows by the transpose of a BF16 weight, as `d3serve.kernels.operations.linear` does.

    Raises:
        TypeError: the rows or the weight are not held plainly.
    """
    plain = (
        [weight] if isinstance(weight, Tensor) else weight.parts if isinstance(weight, StackedMatrix) else []
    )
    matrices = [part for part in plain if isinstance(part, Tensor) and part.dtype == torch.bfloat16]
    if not isinstance(x, Tensor) or not matrices or len(matrices) < len(plain):
        raise TypeError("only FP32 rows and BF16 weights are split")
    if out is None:
        out = torch.empty(len(x), weight.shape[0], device=x.device)
    for matrix, columns in zip(matrices, out.split([len(each) for each in matrices], dim=1), strict=True):
        thrice = matrix.repeat(1, 3).T
        for rows, its_columns in zip(x.split(STEP_ROWS), columns.split(STEP_ROWS), strict=True):
            # The smallest part first: a tensor core drops what lies below the last bit of the sum so far.
            its_columns.copy_(product(torch.cat(split(rows, 3)[::-1], 1), thrice))
    return out


class SplitOperations(RoundedOperations):
    """The reference operations in FP32, with attention's products split."""

    def attention_steps(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, plan: Both, *, softmax_scale: float
    ) -> Iterator[int]:
        """Attend into `out`: a state, and all questions on a state at once."""
        for _, found in groupby(plan.exact.segments, _company):
            segments = list(found)
            for head in range(k_pool.shape[1]):
                pools = k_pool[:, head], v_pool[:, head]
                group = slice(
                    head * q.shape[1] // k_pool.shape[1], (head + 1) * q.shape[1] // k_pool.shape[1]
                )
                _attend(q[:, group], *pools, out[:, group], segments, softmax_scale)
            yield sum(each.length * (each.prefix_length + each.length) for each in segments)


def _company(segment: Segment) -> Hashable:
    """Equal for questions on one state, whose own keys stand in the order of their rows."""
    prefix = (segment.prefix_start, segment.prefix_length, segment.own_start - segment.start)
    return prefix if segment.prefix_length else segment.start


def _attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, segments: Sequence[Segment], scale: float
) -> None:
    """Attend for one key/value head: q and out [T, group, D], pools [P, D]."""
    first, last, (_, group, width) = segments[0], segments[-1], q.shape
    prefix = slice(first.prefix_start, first.prefix_start + first.prefix_length)
    own = slice(first.own_start, last.own_start + last.length)
    keys, values = (torch.cat((pool[prefix], pool[own])) for pool in (k_pool, v_pool))
    (k_high, k_low), v_parts = split(keys, 2), split(values, 2)
    k_parts, both_v = torch.cat((k_high, k_low, k_high), 1).T, torch.cat(v_parts, 1)
    lengths = torch.tensor([segment.length for segment in segments], device=q.device)
    owner = torch.repeat_interleave(torch.arange(len(segments), device=q.device), lengths)
    step = max(1, SCORES // (group * len(keys)))
    for begin in range(first.start, last.start + last.length, step):
        rows = slice(begin, min(begin + step, last.start + last.length))
        high, low = split((q[rows] * scale).flatten(0, 1), 2)
        scores = product(torch.cat((low, high, high), 1), k_parts)
        mine = owner[rows.start - first.start : rows.stop - first.start].repeat_interleave(group)
        if len(segments) > 1:
            scores[:, first.prefix_length :].masked_fill_(mine[:, None] != owner, float("-inf"))
        weights = scores.softmax(-1)
        del scores
        high, low = split(weights, 2)
        by_high = product(high, both_v)
        attended = product(low, v_parts[0]) + by_high[:, width:] + by_high[:, :width]
        out[rows] = attended.unflatten(0, (-1, group))
