"""Few rows times four-bit weights on Hopper: some warps unpack while the tensor cores work on what others unpacked.

Written in Gluon, the layer of Triton that leaves layouts, waiting and the parts of warps to us: of Triton's own loop
each group waits for the one before. Tensor cores read the weight from registers and the activations from shared
memory, into which a warp of its own brings both by TMA, several groups ahead.
"""

from functools import cache
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

GROUP = gl.constexpr(128)  # columns of a scale
WORDS = gl.constexpr(16)  # that hold them
HALF = gl.constexpr(GROUP.value // 2)  # of them: a line of shared memory
ROWS = gl.constexpr(64)  # of the weight, that four warps multiply: an instruction's
ALIGNMENT = 16  # bytes, of what TMA reads
PAIRS, REGISTERS = gl.constexpr(int4_weights.PAIRS.value), gl.constexpr(int4_weights.REGISTERS.value)
MINUS_128, TWICE = gl.constexpr(int4_weights.MINUS_128.value), gl.constexpr(int4_weights.TWICE.value)
FETCHING, MULTIPLYING = gl.constexpr(24), gl.constexpr(240)  # registers of a thread, where two sets multiply
SHARED = 128  # registers of a thread of a program that shares its processor with another
load_tile = (
    getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
)  # the latter is Triton 3.6's name
# Four warps hold words [64, 16] so that a thread has what it has of their weights as an operand of the tensor cores.
HELD = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)


class Tile(NamedTuple):
    """Launch shape of a program, and what a group takes it on an H200, in microseconds.

    `sets` of four warps multiply 64 rows of the weight each, by `block_t` and `more_t` rows of the activations, each a
    power of two or none, of which `slots` groups are in shared memory. `ahead`: a half of a group stays with the tensor
    cores while the next group is waited for; the compiler has no registers for it where two sets sum more than 96
    rows. A program of one set shares its processor with another, if there is one: `paired` is what then takes both.
    """

    sets: int
    block_t: int
    more_t: int
    slots: int
    ahead: bool
    alone: float
    paired: float | None = None

    @property
    def block(self) -> int:
        """Rows of the activations in all."""
        return self.block_t + self.more_t

    @property
    def held(self) -> int:
        """Programs that a processor holds at once."""
        return 1 if self.paired is None else 2

    def round_of(self, T: int, processors: int) -> int:
        """Rows of a weight that all processors multiply at once, whole tiles of the activations; at least a tile's."""
        return max(1, self.held * processors // triton.cdiv(T, self.block)) * self.sets * ROWS.value

    def microseconds(self, T: int, rows: int, processors: int) -> float:
        """About what a group of a product takes: rounds in which each processor has all that it holds."""
        programs = triton.cdiv(T, self.block) * triton.cdiv(rows, self.sets * ROWS.value)
        rounds, rest = divmod(programs, self.held * processors)
        whole = self.alone if self.paired is None else self.paired
        return rounds * whole + (whole if rest > processors else self.alone if rest else 0)


# None changes the order of a sum. Tried on an H200 with others, by products of 1 to 512 rows (ADR 17).
TILES = (
    Tile(1, 32, 0, 4, True, 0.43, 0.49),
    Tile(1, 64, 0, 3, True, 0.45, 0.54),
    Tile(1, 64, 32, 3, True, 0.49, 0.65),
    Tile(1, 128, 0, 3, True, 0.50, 0.71),
    Tile(2, 64, 32, 6, True, 0.64),
    Tile(2, 128, 64, 3, False, 0.96),
    Tile(2, 256, 0, 3, False, 1.23),
)
SECOND_LAUNCH = 0.1  # microseconds a group, of 40 of them


@cache
def tiles_of(T: int, rows: int, processors: int) -> tuple[tuple[Tile, int], ...]:
    """What multiplies T rows of activations by `rows` of a weight soonest: a tile for so many rows, or for two parts.

    In two parts the first is whole rounds of its tile, and what is left goes to a smaller one, that ends sooner.
    """

    def one(rows: int) -> tuple[float, tuple[tuple[Tile, int], ...]]:
        tile = min(TILES, key=lambda tile: tile.microseconds(T, rows, processors))
        return tile.microseconds(T, rows, processors), ((tile, rows),)

    found = [one(rows)]
    for tile in TILES:
        whole = rows - rows % tile.round_of(T, processors)
        if 0 < whole < rows:
            taken, parts = one(rows - whole)
            taken += tile.microseconds(T, whole, processors) + SECOND_LAUNCH
            found.append((taken, ((tile, whole), *parts)))
    return min(found, key=lambda each: each[0])[1]


@gluon.jit
def _pair(words, scale, minus, AT: gl.constexpr):
    """As `int4_weights._pair`."""
    return gl.inline_asm_elementwise(
        PAIRS[AT], REGISTERS, [words, minus, scale], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )


@gluon.jit
def _halves(words):
    """A group's words [64, 16] as those of its first and of its second 64 columns: nothing leaves its thread."""
    halves = words.reshape([ROWS, 4, 2, 2]).permute((0, 1, 3, 2))
    first, second = gl.split(halves)
    return first.reshape([ROWS, WORDS // 2]), second.reshape([ROWS, WORDS // 2])


@gluon.jit
def _to_weights(words, scale, minus, operand: gl.constexpr):
    """As `int4_weights.to_weights`, of half a group: nothing leaves its thread, nor its register."""
    of_rows: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    scale, _ = gl.broadcast(gl.convert_layout(scale, of_rows, assert_trivial=True)[:, None], words)
    minus, _ = gl.broadcast(gl.convert_layout(minus, of_rows, assert_trivial=True)[:, None], words)
    even0, odd0 = _pair(words, scale, minus, 0)
    even1, odd1 = _pair(words, scale, minus, 1)
    even2, odd2 = _pair(words, scale, minus, 2)
    even3, odd3 = _pair(words, scale, minus, 3)
    first = gl.join(gl.join(even0, odd0), gl.join(even1, odd1))
    second = gl.join(gl.join(even2, odd2), gl.join(even3, odd3))
    stored = gl.join(first, second).reshape([ROWS, 4, 2, 2, 2, 2])
    weights = stored.permute((0, 2, 5, 4, 1, 3)).reshape([ROWS, HALF])
    return gl.convert_layout(weights, operand, assert_trivial=True)


@gluon.jit
def _fetch(
    x, more, words, x_slots, more_slots, word_slots, ready, free, groups, t, r, pitch,
    BLOCK_T: gl.constexpr, MORE_T: gl.constexpr, SETS: gl.constexpr,
):  # fmt: skip
    """Ask for each group as soon as its slot is free: the activations, and each set's rows of the weight."""
    slots: gl.constexpr = ready.shape[0]
    nbytes: gl.constexpr = (BLOCK_T + MORE_T) * GROUP * 2 + SETS * ROWS * WORDS * 4
    for group in range(groups):
        slot = group % slots
        bar = ready.index(slot)
        mbarrier.wait(free.index(slot), (group // slots & 1) ^ 1)
        mbarrier.expect(bar, nbytes)
        for part in gl.static_range(SETS):
            load_tile(words, [group * pitch + r + part * ROWS, 0], bar, word_slots.index(SETS * slot + part))
        for half in gl.static_range(2):
            columns = (2 * group + half) * HALF
            load_tile(x, [t, columns], bar, x_slots.index(2 * slot + half))
            if MORE_T > 0:
                load_tile(more, [t + BLOCK_T, columns], bar, more_slots.index(2 * slot + half))


@gluon.jit
def _store(total, out, t, r, T, rows, out_stride):
    """Write a tile of the product; `total` [rows of the weight, rows of the activations]."""
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    done = gl.convert_layout(total.to(gl.bfloat16), stored)
    r += gl.arange(0, total.shape[0], gl.SliceLayout(1, stored))
    t += gl.arange(0, total.shape[1], gl.SliceLayout(0, stored))
    target = out + t.to(gl.int64)[None, :] * out_stride + r[:, None]
    gl.store(target, done, mask=(r < rows)[:, None] & (t < T)[None, :])


@gluon.jit
def _add(
    total, more_total, words, scale, minus, before, x_slots, more_slots, half,
    MORE_T: gl.constexpr, LEFT: gl.constexpr, operand: gl.constexpr, more_operand: gl.constexpr,
):  # fmt: skip
    """Add the products of half a group and wait until `LEFT` halves are left; `before` are the weights of the last."""
    weights = _to_weights(words, scale, minus, operand)
    total = warpgroup_mma(weights, x_slots.index(half).permute((1, 0)), total, is_async=True)
    if MORE_T > 0:
        same = gl.convert_layout(weights, more_operand, assert_trivial=True)
        more_total = warpgroup_mma(same, more_slots.index(half).permute((1, 0)), more_total, is_async=True)
        total, more_total, before = warpgroup_mma_wait(2 * LEFT, deps=[total, more_total, before])
    else:
        total, before = warpgroup_mma_wait(LEFT, deps=[total, before])
    return total, more_total, weights


@gluon.jit
def _multiply(
    scale, zero, out, x_slots, more_slots, word_slots, ready, free, T, rows, groups, t, first,
    scale_stride, zero_stride, out_stride,
    PART: gl.constexpr, BLOCK_T: gl.constexpr, MORE_T: gl.constexpr, SETS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Sum one set's rows over all groups, from the first to the last.

    Operands in registers must not change while the tensor cores read them: a half of a group is unpacked while the
    half before is with them, into registers that the half before that one had.
    """
    slots: gl.constexpr = ready.shape[0]
    tensor: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    more_tensor: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(MORE_T, 8), 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, tensor, 2)
    more_operand: gl.constexpr = gl.DotOperandLayout(0, more_tensor, 2)
    first += PART * ROWS
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, HELD))
    # Numbers this small come from memory on their own, and are asked for two groups ahead.
    ahead = gl.minimum(1, groups - 1)
    row_scale, row_zero = gl.load(scale + r, r < rows, 0.0), gl.load(zero + r, r < rows, 0)
    next_scale = gl.load(scale + ahead * scale_stride + r, r < rows, 0.0)
    next_zero = gl.load(zero + ahead * zero_stride + r, r < rows, 0)
    total = gl.zeros([ROWS, BLOCK_T], gl.float32, tensor)
    more_total = gl.zeros([ROWS, max(MORE_T, 8)], gl.float32, more_tensor)
    second_half = gl.zeros([ROWS, HALF], gl.bfloat16, operand)
    gl.assume(groups > 0)  # or the compiler lets each product wait for the one before
    for group in range(groups):
        slot = group % slots
        ahead = gl.minimum(group + 2, groups - 1)
        later_scale = gl.load(scale + ahead * scale_stride + r, r < rows, 0.0)
        later_zero = gl.load(zero + ahead * zero_stride + r, r < rows, 0)
        minus = (row_zero.to(gl.int32) | MINUS_128) * TWICE
        twice = row_scale.to(gl.uint16, bitcast=True).to(gl.int32) * TWICE
        mbarrier.wait(ready.index(slot), group // slots & 1)
        first_words, second_words = _halves(word_slots.index(SETS * slot + PART).load(HELD))
        total, more_total, first_half = _add(
            total, more_total, first_words, twice, minus, second_half, x_slots, more_slots, 2 * slot,
            MORE_T, 1, operand, more_operand,
        )  # fmt: skip
        if AHEAD > 0:
            mbarrier.arrive(free.index((group + slots - 1) % slots), pred=group > 0)
        total, more_total, second_half = _add(
            total, more_total, second_words, twice, minus, first_half, x_slots, more_slots, 2 * slot + 1,
            MORE_T, AHEAD, operand, more_operand,
        )  # fmt: skip
        if AHEAD == 0:
            mbarrier.arrive(free.index(slot))
        row_scale, row_zero, next_scale, next_zero = next_scale, next_zero, later_scale, later_zero
    total, more_total, second_half = warpgroup_mma_wait(0, deps=[total, more_total, second_half])
    _store(total, out, t, first, T, rows, out_stride)
    if MORE_T > 0:
        _store(more_total, out, t + BLOCK_T, first, T, rows, out_stride)


@gluon.jit(do_not_specialize=["T", "groups"])
def _int4_linear_kernel(
    x, more, words, scale, zero, out, T, rows, groups, pitch, scale_stride, zero_stride, out_stride,
    BLOCK_T: gl.constexpr, MORE_T: gl.constexpr, SETS: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Program (rows of x, rows of the weight): the transposed product, so that weights stay in registers."""
    first_set: gl.constexpr = gl.constexpr(0)
    second_set: gl.constexpr = gl.constexpr(1)
    t, r = gl.program_id(0) * (BLOCK_T + MORE_T), gl.program_id(1) * (SETS * ROWS)
    x_slots = gl.allocate_shared_memory(gl.bfloat16, [2 * SLOTS, BLOCK_T, HALF], x.layout)
    more_slots = x_slots
    if MORE_T > 0:
        more_slots = gl.allocate_shared_memory(gl.bfloat16, [2 * SLOTS, MORE_T, HALF], more.layout)
    word_slots = gl.allocate_shared_memory(gl.int32, [SETS * SLOTS, ROWS, WORDS], words.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(SLOTS):
        mbarrier.init(ready.index(each), count=1)
        mbarrier.init(free.index(each), count=SETS)
    fence_async_shared()
    if SETS == 1:
        gl.warp_specialize([
            (_multiply, (scale, zero, out, x_slots, more_slots, word_slots, ready, free, T, rows, groups, t, r,
                 scale_stride, zero_stride, out_stride, first_set, BLOCK_T, MORE_T, SETS, AHEAD)),
            (_fetch, (x, more, words, x_slots, more_slots, word_slots, ready, free, groups, t, r, pitch,
                      BLOCK_T, MORE_T, SETS)),
        ], [1], [FETCHING])  # fmt: skip
    else:
        gl.warp_specialize([
            (_fetch, (x, more, words, x_slots, more_slots, word_slots, ready, free, groups, t, r, pitch,
                      BLOCK_T, MORE_T, SETS)),
            (_multiply, (scale, zero, out, x_slots, more_slots, word_slots, ready, free, T, rows, groups, t, r,
                 scale_stride, zero_stride, out_stride, first_set, BLOCK_T, MORE_T, SETS, AHEAD)),
            (_multiply, (scale, zero, out, x_slots, more_slots, word_slots, ready, free, T, rows, groups, t, r,
                 scale_stride, zero_stride, out_stride, second_set, BLOCK_T, MORE_T, SETS, AHEAD)),
        ], [4, 4], [MULTIPLYING, MULTIPLYING])  # fmt: skip
    # What the parts share is theirs to the end: nothing that one of them stores through may lie in it.
    x_slots._keep_alive()  # noqa: SLF001  (Gluon's examples say it so; there is no other name)
    more_slots._keep_alive()  # noqa: SLF001
    word_slots._keep_alive()  # noqa: SLF001
    ready._keep_alive()  # noqa: SLF001
    free._keep_alive()  # noqa: SLF001


def multiplies(x: Tensor, weight: Int4Matrix) -> bool:
    """Whether the kernel takes them: BF16 where TMA can read it, and groups of 128."""
    aligned = x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * x.itemsize % ALIGNMENT == 0
    return x.dtype == torch.bfloat16 and weight.group == GROUP.value and aligned


def multiply(x: Tensor, weight: Int4Matrix, out: Tensor, processors: int) -> None:
    """Multiply x [T, columns] by the transpose of a weight that stays packed, into out [T, rows]."""
    start = 0
    for tile, rows in tiles_of(len(x), weight.shape[0], processors):
        part = slice(start, start + rows)
        _launch(x, weight[part], out[:, part], tile)
        start += rows


def _launch(x: Tensor, weight: Int4Matrix, out: Tensor, tile: Tile) -> None:
    T, (rows, _), groups = len(x), weight.shape, len(weight.words)
    pitch = weight.words.stride(0) // WORDS.value  # from one group of a row to the next, in rows
    words = weight.words.as_strided((pitch * (groups - 1) + rows, WORDS.value), (WORDS.value, 1))
    x = _whole_tiles(x, tile.block)
    _int4_linear_kernel[(triton.cdiv(T, tile.block), triton.cdiv(rows, tile.sets * ROWS.value))](
        _described(x, [tile.block_t, HALF.value], gl.bfloat16),
        _described(x, [tile.more_t or tile.block_t, HALF.value], gl.bfloat16),
        _described(words, [ROWS.value, WORDS.value], gl.int32),
        weight.scale, weight.zero, out, T, rows, groups, pitch,
        weight.scale.stride(0), weight.zero.stride(0), out.stride(0),
        BLOCK_T=tile.block_t, MORE_T=tile.more_t, SETS=tile.sets, SLOTS=tile.slots, AHEAD=int(tile.ahead), num_warps=4,
        maxnreg=SHARED if tile.paired else None,
    )  # fmt: skip


def _whole_tiles(x: Tensor, block: int) -> Tensor:
    """With what follows x in its memory, up to the end of its last tile: TMA takes long over rows that are not there.

    What is read there is multiplied into rows of the product that are not stored.
    """
    rows = triton.cdiv(len(x), block) * block
    end = x.storage_offset() + (rows - 1) * x.stride(0) + x.shape[1]
    inside = end * x.itemsize <= x.untyped_storage().nbytes()
    return x.as_strided((rows, x.shape[1]), x.stride()) if inside else x


def _described(x: Tensor, block: list[int], dtype: gl.dtype) -> TensorDescriptor:
    """What TMA reads a `block` of at a time."""
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
