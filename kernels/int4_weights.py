"""How packed bytes become weights: (q - zero) · scale, exact in FP32 and rounded once, whichever way it is computed."""

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

# The same of four bytes at once in BF16, two numbers in a register: 128 + q, less 128 + zero, times scale. The first
# two are exact there too. Both steps are fused multiply-adds, since BF16 has those on every card from Ampere on.
BYTES_TO_BF16 = """{{
    .reg .b32 first, second, one, nought;
    mov.b32 one, 0x3F803F80;
    mov.b32 nought, 0x80008000;
    shr.u32 first, $2, {shift};
    prmt.b32 second, first, 0, 0x4342;
    prmt.b32 first, first, 0, 0x4140;
    lop3.b32 first, first, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 second, second, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 first, first, one, $3;
    fma.rn.bf16x2 second, second, one, $4;
    fma.rn.bf16x2 $0, first, $5, nought;
    fma.rn.bf16x2 $1, second, $6, nought;
}}"""
LOW = tl.constexpr(BYTES_TO_BF16.format(shift=0))
HIGH = tl.constexpr(BYTES_TO_BF16.format(shift=4))
REGISTERS = tl.constexpr("=&r,=&r,r,r,r,r,r")


def has_bytes_to_bf16(card: Card, dtype: torch.dtype) -> bool:
    """Whether kernels unpack by `BYTES_TO_BF16`: the interpreter knows no machine code, and it makes BF16 alone."""
    return dtype == torch.bfloat16 and card is not INTERPRETER


@triton.jit
def to_weights(packed, scale, zero, dtype: tl.constexpr, HIGH_BITS: tl.constexpr, AT_ONCE: tl.constexpr):  # noqa: ANN201  (Triton knows no annotations but constexpr)
    """The weights in the low or the high bits of bytes [rows, columns], of a scale and a zero point for each row."""
    if AT_ONCE:
        minus = (-128.0 - zero.to(tl.float32)).to(tl.bfloat16)
        shape: tl.constexpr = packed.shape
        operands = [packed, tl.broadcast_to(minus[:, None], shape), tl.broadcast_to(scale[:, None], shape)]
        return tl.inline_asm_elementwise(
            HIGH if HIGH_BITS else LOW, REGISTERS, operands, dtype=tl.bfloat16, is_pure=True, pack=4
        )
    nibbles = packed >> 4 if HIGH_BITS else packed & 0xF
    whole = (nibbles.to(tl.int32) | WHOLE_BITS).to(tl.float32, bitcast=True)
    return ((whole - (zero.to(tl.float32) + WHOLE)[:, None]) * scale.to(tl.float32)[:, None]).to(dtype)


@triton.jit
def _unpack_kernel(
    values, scale, zero, out, rows, columns, values_stride, scale_stride, zero_stride,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (rows, group): write two runs of columns of each row."""
    group = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs = tl.arange(0, HALF)
    live = r < rows
    mask = live[:, None]
    packed = tl.load(values + group * values_stride + r[:, None] * HALF + offs[None, :], mask=mask, other=0)
    row_scale = tl.load(scale + group * scale_stride + r, mask=live, other=0.0)
    row_zero = tl.load(zero + group * zero_stride + r, mask=live, other=0)
    target = out + r.to(tl.int64)[:, None] * columns + group * (2 * HALF) + offs[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(target, to_weights(packed, row_scale, row_zero, dtype, False, AT_ONCE), mask=mask)
    tl.store(target + HALF, to_weights(packed, row_scale, row_zero, dtype, True, AT_ONCE), mask=mask)


def unpack(weight: Int4Matrix, dtype: torch.dtype) -> Tensor:
    """Unpack a weight into fresh memory: [rows, columns] in `dtype`."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.values.device)
    _unpack_kernel[(triton.cdiv(rows, UNPACK_ROWS), len(weight.values))](
        weight.values, weight.scale, weight.zero, out, rows, columns,
        weight.values.stride(0), weight.scale.stride(0), weight.zero.stride(0),
        HALF=weight.group // 2, BLOCK_R=UNPACK_ROWS, num_warps=4,
        AT_ONCE=has_bytes_to_bf16(cards.card(out.device), dtype),
    )  # fmt: skip
    return out
