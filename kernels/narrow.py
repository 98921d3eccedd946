"""The product with a narrow weight: the two gates of a linear layer's heads, 96 columns beside 16,384 in FP8.

A library that may not split sums takes 0.1 ms for it up to a thousand rows, since it has work for a few of a device's
processors then; that would be 5 ms of a pass. Here a program takes few rows, and the weight comes from the cache.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

# Rows of the weight: tensor cores take them as their tall side, so that few activations fill a tile.
BLOCK_R = 64


class NarrowTile(NamedTuple):
    """Launch shape of a program: rows of activations, columns at a time. None of it changes the order of a sum."""

    block_t: int
    block_k: int
    num_warps: int
    num_stages: int


# Of what an H200 was fastest with, what fits any card.
FEW, MANY = NarrowTile(16, 128, 4, 4), NarrowTile(128, 64, 4, 3)
MANY_ROWS = 4096


@triton.jit(do_not_specialize=["T"])
def _narrow_linear_kernel(
    x, weight, out, T, rows, columns, x_stride, weight_stride, out_stride,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (rows of x, rows of the weight): the transposed product."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    live_t, live_r = t < T, r < rows
    p_x = x + t[:, None] * x_stride + k[None, :]
    p_weight = weight + r[:, None] * weight_stride + k[None, :]
    total = tl.zeros([BLOCK_R, BLOCK_T], dtype=tl.float32)
    for start in range(0, columns, BLOCK_K):
        live_k = (k < columns - start)[None, :]
        left = tl.load(p_weight + start, mask=live_r[:, None] & live_k, other=0.0)
        right = tl.load(p_x + start, mask=live_t[:, None] & live_k, other=0.0)
        total = tl.dot(left, tl.trans(right), total)
    target = out + t[None, :] * out_stride + r[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=live_r[:, None] & live_t[None, :])


def narrow_linear(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Multiply x [T, columns] by the transpose of a weight [rows, columns] into `out` [T, rows], summed in FP32.

    Columns are contiguous, rows may be strided.
    """
    T, (rows, columns) = len(x), weight.shape
    if not T:
        return out
    tile = FEW if T < MANY_ROWS else MANY
    _narrow_linear_kernel[(triton.cdiv(T, tile.block_t), triton.cdiv(rows, BLOCK_R))](
        x, weight, out, T, rows, columns, x.stride(0), weight.stride(0), out.stride(0),
        BLOCK_R=BLOCK_R, BLOCK_T=tile.block_t, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
