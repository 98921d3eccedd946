"""Few rows times four-bit weights on Hopper: threads unpack one half of a group while tensor cores work on another.

Written in Gluon, the layer of Triton that leaves layouts and waiting to us: of Triton's own loop each half waits for
the one before. Tensor cores read the weight from registers and the activations from shared memory, into which TMA
brings both, several halves ahead.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from d3serve.kernels import int4_weights
from d3serve.kernels.matrix import Int4Matrix

GROUP = 128  # columns of a scale; a half of them are one line of shared memory
HALF = gl.constexpr(GROUP // 2)
ALIGNMENT = 16  # bytes, of what TMA reads
LOW, HIGH, REGISTERS = (
    gl.constexpr(each.value) for each in (int4_weights.LOW, int4_weights.HIGH, int4_weights.REGISTERS)
)
load_tile = (
    getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
)  # the latter is Triton 3.6's name


class Tile(NamedTuple):
    """Launch shape of a program: rows of the weight, rows of the activations, groups in shared memory."""

    block_r: int
    block_t: int
    num_warps: int
    slots: int


# By rows of activations; the order of a sum is the same in all. Measured on an H200 (ADR 17): one program a processor
# of the widest, two of the others.
TILES = (Tile(64, 32, 4, 8), Tile(64, 64, 4, 5), Tile(64, 128, 4, 3), Tile(64, 256, 4, 3))
LAST = Tile(64, 64, 4, 5)


@gluon.jit
def _to_weights(packed, scale, minus, HIGH_BITS: gl.constexpr):
    """As `int4_weights.to_weights`; `minus` is -(128 + zero)."""
    minus, _ = gl.broadcast(minus[:, None], packed)
    scale, _ = gl.broadcast(scale[:, None], packed)
    return gl.inline_asm_elementwise(
        HIGH if HIGH_BITS else LOW, REGISTERS, [packed, minus, scale], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.jit
def _fetch(x, values, x_slots, value_slots, ready, group, groups, t, r, pitch):
    """Ask for what a group needs: two halves of the activations, and the weight's bytes."""
    slots: gl.constexpr = value_slots.shape[0]
    slot, there = group % slots, group < groups
    bar = ready.index(slot)
    mbarrier.expect(bar, 2 * x.block_type.nbytes + values.block_type.nbytes, pred=there)
    load_tile(values, [group * pitch + r, 0], bar, value_slots.index(slot), pred=there)
    for half in gl.static_range(2):
        load_tile(x, [t, (2 * group + half) * HALF], bar, x_slots.index(2 * slot + half), pred=there)


@gluon.jit(do_not_specialize=["T", "groups"])
def _int4_linear_kernel(
    x, values, scale, zero, out, T, rows, groups, pitch, scale_stride, zero_stride, out_stride,
    BLOCK_R: gl.constexpr, BLOCK_T: gl.constexpr, SLOTS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Program (rows of x, rows of the weight): the transposed product, so that weights stay in registers.

    Up to four halves are with the tensor cores, two while the next group is waited for and unpacked.
    """
    tensor: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_T, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, tensor, 2)
    t, first = gl.program_id(0) * BLOCK_T, gl.program_id(1) * BLOCK_R
    x_slots = gl.allocate_shared_memory(gl.bfloat16, [2 * SLOTS, BLOCK_T, HALF], x.layout)
    value_slots = gl.allocate_shared_memory(gl.uint8, [SLOTS, BLOCK_R, HALF], values.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(SLOTS):
        mbarrier.init(ready.index(each), count=1)
    fence_async_shared()
    for early in gl.static_range(SLOTS - 1):
        _fetch(x, values, x_slots, value_slots, ready, early, groups, t, first, pitch)
    r = first + gl.arange(0, BLOCK_R, gl.SliceLayout(1, operand))
    row_scale, row_zero = gl.load(scale + r, r < rows, 0.0), gl.load(zero + r, r < rows, 0)
    total = gl.zeros([BLOCK_R, BLOCK_T], gl.float32, tensor)
    low_before = gl.zeros([BLOCK_R, HALF], gl.bfloat16, operand)
    high_before = low_before
    for group in range(groups):
        ahead = gl.minimum(group + 1, groups - 1)
        next_scale = gl.load(scale + ahead * scale_stride + r, r < rows, 0.0)
        next_zero = gl.load(zero + ahead * zero_stride + r, r < rows, 0)
        minus = (-128.0 - row_zero.to(gl.float32)).to(gl.bfloat16)
        slot = group % SLOTS
        mbarrier.wait(ready.index(slot), group // SLOTS & 1)
        packed = value_slots.index(slot).load(operand)
        low = _to_weights(packed, row_scale, minus, False)
        total = warpgroup_mma(low, x_slots.index(2 * slot).permute((1, 0)), total, is_async=True)
        high = _to_weights(packed, row_scale, minus, True)
        total = warpgroup_mma(high, x_slots.index(2 * slot + 1).permute((1, 0)), total, is_async=True)
        # The group before is done, and its slot free.
        total, low_before, high_before = warpgroup_mma_wait(2, deps=[total, low_before, high_before])
        _fetch(x, values, x_slots, value_slots, ready, group - 1 + SLOTS, groups, t, first, pitch)
        low_before, high_before = low, high
        row_scale, row_zero = next_scale, next_zero
    total, low_before, high_before = warpgroup_mma_wait(0, deps=[total, low_before, high_before])
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    done = gl.convert_layout(total.to(gl.bfloat16), stored)
    r = first + gl.arange(0, BLOCK_R, gl.SliceLayout(1, stored))
    t += gl.arange(0, BLOCK_T, gl.SliceLayout(0, stored))
    target = out + t.to(gl.int64)[None, :] * out_stride + r[:, None]
    gl.store(target, done, mask=(r < rows)[:, None] & (t < T)[None, :])


def multiplies(x: Tensor, weight: Int4Matrix) -> bool:
    """Whether the kernel takes them: BF16 where TMA can read it, and groups of 128."""
    aligned = x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * x.itemsize % ALIGNMENT == 0
    return x.dtype == torch.bfloat16 and weight.group == GROUP and aligned


def multiply(x: Tensor, weight: Int4Matrix, out: Tensor, processors: int) -> None:
    """Multiply x [T, columns] by the transpose of a weight that stays packed, into out [T, rows].

    Where programs fill all processors but for a few at the end, those few are made smaller, so that they end sooner.
    """
    rows = weight.shape[0]
    tile = next((each for each in TILES if len(x) <= each.block_t), TILES[-1])
    whole = rows
    if tile is TILES[-1]:
        wave = processors // triton.cdiv(len(x), tile.block_t) * tile.block_r
        if wave < rows and rows % wave <= wave // 4:
            whole = rows - rows % wave
    _launch(x, weight[:whole], out[:, :whole], tile)
    if whole < rows:
        _launch(x, weight[whole:], out[:, whole:], LAST)


def _launch(x: Tensor, weight: Int4Matrix, out: Tensor, tile: Tile) -> None:
    T, (rows, _), groups = len(x), weight.shape, len(weight.values)
    pitch = weight.values.stride(0) // HALF.value  # from one group of a row to the next, in rows
    held = weight.values.as_strided((pitch * (groups - 1) + rows, HALF.value), (HALF.value, 1))
    _int4_linear_kernel[(triton.cdiv(T, tile.block_t), triton.cdiv(rows, tile.block_r))](
        _described(x, tile.block_t, gl.bfloat16), _described(held, tile.block_r, gl.uint8),
        weight.scale, weight.zero, out, T, rows, groups, pitch,
        weight.scale.stride(0), weight.zero.stride(0), out.stride(0),
        BLOCK_R=tile.block_r, BLOCK_T=tile.block_t, SLOTS=tile.slots, num_warps=tile.num_warps,
    )  # fmt: skip


def _described(x: Tensor, rows: int, dtype: gl.dtype) -> TensorDescriptor:
    """What TMA reads `rows` of at a time, and half a group of columns."""
    block = [rows, HALF.value]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
