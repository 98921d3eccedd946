"""How packed words become weights: (q - zero) · scale, exact in FP32 and rounded once, whichever way it is computed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3serve.kernels import cards
from d3serve.kernels.cards import INTERPRETER, Card
from d3serve.kernels.matrix import Int4Matrix

UNPACK_ROWS = 64  # rows of one group that a program unpacks: 4 KB read, 16 KB written
# FP32 numbers from here on are whole: bits of a small integer laid over this one's are that integer above it. Turning
# integers into floats by instruction runs at a fraction of the rate of adding.
WHOLE = tl.constexpr(8_388_608.0)
WHOLE_BITS = tl.constexpr(0x4B000000)

# Two neighbours of a word at once in BF16, two numbers in a register: 128 + q, less 128 + zero, times scale. The first
# two are exact there too. Both steps are fused multiply-adds, since BF16 has those on every card from Ampere on.
PAIR_TO_BF16 = """{{
    .reg .b32 pair, one, nought;
    mov.b32 one, 0x3F803F80;
    mov.b32 nought, 0x80008000;
    shr.u32 pair, $2, {shift};
    lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 pair, pair, one, $3;
    fma.rn.bf16x2 pair, pair, $4, nought;
    mov.b32 {{$0, $1}}, pair;
}}"""
PAIRS = tl.constexpr(tuple(PAIR_TO_BF16.format(shift=4 * each) for each in range(4)))
REGISTERS = tl.constexpr("=h,=h,r,r,r")
MINUS_128 = tl.constexpr(0xC300)  # in BF16; with a zero point's bits laid over it, less that zero point
TWICE = tl.constexpr(0x10001)  # a number of 16 bits times this is there in both halves of 32


def has_pair_to_bf16(card: Card, dtype: torch.dtype) -> bool:
    """Whether kernels unpack by `PAIR_TO_BF16`: the interpreter knows no machine code, and it makes BF16 alone."""
    return dtype == torch.bfloat16 and card is not INTERPRETER


@triton.jit
def _pair(words, scale, zero, dtype: tl.constexpr, AT: tl.constexpr, AT_ONCE: tl.constexpr):
    """Two neighbouring columns of each word, the even one first."""
    if AT_ONCE:
        minus = (zero.to(tl.int32) | MINUS_128) * TWICE
        twice = scale.to(tl.uint16, bitcast=True).to(tl.int32) * TWICE
        operands = [
            words,
            tl.broadcast_to(minus[:, None], words.shape),
            tl.broadcast_to(twice[:, None], words.shape),
        ]
        return tl.inline_asm_elementwise(
            PAIRS[AT], REGISTERS, operands, dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
    offset, factor = (zero.to(tl.float32) + WHOLE)[:, None], scale.to(tl.float32)[:, None]
    even = ((words >> 4 * AT & 0xF) | WHOLE_BITS).to(tl.float32, bitcast=True)
    odd = ((words >> 4 * AT + 16 & 0xF) | WHOLE_BITS).to(tl.float32, bitcast=True)
    return ((even - offset) * factor).to(dtype), ((odd - offset) * factor).to(dtype)


@triton.jit
def to_weights(words, scale, zero, dtype: tl.constexpr, AT_ONCE: tl.constexpr):  # noqa: ANN201  (Triton knows no annotations but constexpr)
    """The weights [rows, group] in words [rows, group / 8] of int32, of a scale and a zero point for each row."""
    rows: tl.constexpr = words.shape[0]
    count: tl.constexpr = words.shape[1]
    even0, odd0 = _pair(words, scale, zero, dtype, 0, AT_ONCE)
    even1, odd1 = _pair(words, scale, zero, dtype, 1, AT_ONCE)
    even2, odd2 = _pair(words, scale, zero, dtype, 2, AT_ONCE)
    even3, odd3 = _pair(words, scale, zero, dtype, 3, AT_ONCE)
    first = tl.join(
        tl.join(even0, odd0), tl.join(even1, odd1)
    )  # [rows, words, o, h], as `Int4Matrix` names them
    second = tl.join(tl.join(even2, odd2), tl.join(even3, odd3))
    stored = tl.reshape(tl.join(first, second), [rows, 4, count // 4, 2, 2, 2])
    return tl.reshape(tl.permute(stored, (0, 2, 5, 4, 1, 3)), [rows, 8 * count])


@triton.jit
def _unpack_kernel(
    values, scale, zero, out, rows, columns, values_stride, scale_stride, zero_stride,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (rows, group): write a run of columns of each row."""
    group = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = r < rows
    count: tl.constexpr = GROUP // 8
    p_words = values + group * values_stride + r[:, None] * count + tl.arange(0, count)[None, :]
    row_scale = tl.load(scale + group * scale_stride + r, mask=live, other=0.0)
    row_zero = tl.load(zero + group * zero_stride + r, mask=live, other=0)
    packed = tl.load(p_words, mask=live[:, None], other=0)
    target = out + r.to(tl.int64)[:, None] * columns + group * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(
        target, to_weights(packed, row_scale, row_zero, out.dtype.element_ty, AT_ONCE), mask=live[:, None]
    )


def unpack(weight: Int4Matrix, dtype: torch.dtype) -> Tensor:
    """Unpack a weight into fresh memory: [rows, columns] in `dtype`."""
    rows, columns = weight.shape
    words = weight.words
    out = torch.empty(rows, columns, dtype=dtype, device=words.device)
    _unpack_kernel[(triton.cdiv(rows, UNPACK_ROWS), len(words))](
        words, weight.scale, weight.zero, out, rows, columns,
        words.stride(0), weight.scale.stride(0), weight.zero.stride(0),
        GROUP=weight.group, BLOCK_R=UNPACK_ROWS, num_warps=4,
        AT_ONCE=has_pair_to_bf16(cards.card(out.device), dtype),
    )  # fmt: skip
    return out
