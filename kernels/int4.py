"""Products with weights of four bits: unpacked in registers for few rows, in memory for many.

Either way a weight becomes the same number, (q - zero) · scale rounded once to the type of the activations, and a sum
runs over the columns in their order, so that a row has the same bits whichever way its pass took. Whether it has is
asked of the card itself; ADR 17 says why there are two ways, and what was counted.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from d3serve.kernels import cards
from d3serve.kernels.cards import Card
from d3serve.kernels.int4_weights import has_pair_to_bf16, to_weights, unpack
from d3serve.kernels.matrix import Int4Matrix


class Int4Tile(NamedTuple):
    """Launch shape of a program of the product: rows of the weight, rows of the activations."""

    block_r: int
    block_t: int
    num_warps: int
    num_stages: int


# For few rows and for many; none of it changes the order of a sum. Computed from what fits; of the first an H200 liked
# the second best of fifteen, before it had a kernel of its own.
FROM_SHARED = (Int4Tile(64, 32, 4, 5), Int4Tile(128, 128, 8, 3))  # whose tensor cores read activations there
ELSEWHERE = (Int4Tile(64, 32, 4, 3), Int4Tile(64, 64, 4, 3))
LAUNCHES = (32, 64, 96, 128, 192, 256)  # rows of the activations up to which launch shapes differ
# Rows that stay packed, measured on an H200: for more, unpacking is the smaller part, and a library's products faster.
PACKED_ROWS = 1_536


def tile_of(rows: int, card: Card) -> Int4Tile:
    """The launch shape for `rows` of activations."""
    few, many = FROM_SHARED if card.feeds_from_shared else ELSEWHERE
    return few if rows <= few.block_t else many


@triton.jit(do_not_specialize=["T"])
def _int4_linear_kernel(
    x, values, scale, zero, out, T, rows, groups, x_stride, values_stride, scale_stride, zero_stride, out_stride,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (rows of x, rows of the weight): the transposed product, so that weights stay in registers.

    Neighbours take the same weights, so that memory gives them once.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    live_r, live_t = r < rows, t < T
    words: tl.constexpr = GROUP // 8
    p_words = values + r[:, None] * words + tl.arange(0, words)[None, :]
    p_x = x + t.to(tl.int64)[:, None] * x_stride + tl.arange(0, GROUP)[None, :]
    row_scale, row_zero = tl.load(scale + r, mask=live_r, other=0.0), tl.load(zero + r, mask=live_r, other=0)
    total = tl.zeros([BLOCK_R, BLOCK_T], dtype=tl.float32)
    for group in range(groups):
        packed = tl.load(p_words, mask=live_r[:, None], other=0)
        # Numbers this small are not copied ahead by the compiler: asked for a group before they are needed.
        ahead = tl.minimum(group + 1, groups - 1)
        next_scale = tl.load(scale + ahead * scale_stride + r, mask=live_r, other=0.0)
        next_zero = tl.load(zero + ahead * zero_stride + r, mask=live_r, other=0)
        weights = to_weights(packed, row_scale, row_zero, x.dtype.element_ty, AT_ONCE)
        total = tl.dot(weights, tl.trans(tl.load(p_x, mask=live_t[:, None], other=0.0)), total)
        row_scale, row_zero = next_scale, next_zero
        p_words += values_stride
        p_x += GROUP
    target = out + t.to(tl.int64)[None, :] * out_stride + r[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=live_r[:, None] & live_t[None, :])


def multiply_packed(x: Tensor, weight: Int4Matrix, out: Tensor | None = None) -> Tensor:
    """Multiply x [T, columns] by the transpose of a weight that stays packed: [T, rows] in x's type, or `out`."""
    T, (rows, _) = len(x), weight.shape
    if out is None:
        out = torch.empty(T, rows, dtype=x.dtype, device=x.device)
    if not T:
        return out
    card = cards.card(x.device)
    if card.is_hopper and card is not cards.INTERPRETER:
        from d3serve.kernels import int4_hopper  # noqa: PLC0415 # what only Hopper runs

        if int4_hopper.multiplies(x, weight):
            int4_hopper.multiply(x, weight, out, card.processors)
            return out
    tile = tile_of(T, card)
    _int4_linear_kernel[(triton.cdiv(T, tile.block_t), triton.cdiv(rows, tile.block_r))](
        x, weight.words, weight.scale, weight.zero, out, T, rows, len(weight.words), x.stride(0),
        weight.words.stride(0), weight.scale.stride(0), weight.zero.stride(0), out.stride(0),
        GROUP=weight.group, BLOCK_R=tile.block_r, BLOCK_T=tile.block_t,
        AT_ONCE=has_pair_to_bf16(card, x.dtype), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


@cache
def sums_alike(device: torch.device, rows: int, columns: int, group: int) -> bool:
    """Whether packed weights of a size give the bits of a library's product with the same ones unpacked.

    Tried once, on as many sums as a pass has, and in every launch shape, which are so compiled before a client comes:
    which kernel a library takes for a size is its own affair.
    """
    draw = torch.Generator(device).manual_seed(0)
    weight = Int4Matrix.empty(rows, columns, group, device)
    weight.values.random_(0, 256, generator=draw)
    weight.scale.uniform_(0.5, 1.5, generator=draw)
    weight.zero.random_(0, 16, generator=draw)
    x = torch.randn(2 * PACKED_ROWS, columns, generator=draw, dtype=torch.bfloat16, device=device)
    library = F.linear(x, unpack(weight, x.dtype))
    counts = [*(each for each in LAUNCHES if each < PACKED_ROWS), PACKED_ROWS]
    return all(torch.equal(multiply_packed(x[:count], weight), library[:count]) for count in counts)


def int4_linear(x: Tensor, weight: Int4Matrix, out: Tensor | None = None) -> Tensor:
    """Multiply x [T, columns] by the transpose of a four-bit weight [rows, columns]: [T, rows] in x's type, or `out`.

    Columns of x and of `out` are contiguous, rows may be strided. Sums are FP32.

    Raises:
        ValueError: x has other columns than the weight.
    """
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"cannot multiply rows of {x.shape[1]} by INT4 of {list(weight.shape)}")
    few = x.dtype == torch.bfloat16 and len(x) <= PACKED_ROWS
    if few and sums_alike(x.device, *weight.shape, weight.group):
        return multiply_packed(x, weight, out)
    unpacked = unpack(weight, x.dtype)
    return F.linear(x, unpacked) if out is None else torch.mm(x, unpacked.T, out=out)
