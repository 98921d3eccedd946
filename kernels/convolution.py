"""gdn_prepare: from one projection's rows to the gated delta rule's inputs, in one launch.

Depthwise causal convolution, SiLU, the split into heads, the L2 norm of q and k, and the two gates are all
local to a few rows and one head, so one kernel reads the projection once and writes each output once.
"""

import torch
import triton
import triton.language as tl

from d3serve.kernels.recurrence_plan import TILE, TILE_COLUMNS, RecurrencePlan

NORM_EPS = 1e-6  # inside the root, as in transformers' l2norm for Qwen3.5


@triton.jit
def _raw_row(
    mixed, states, back, channels, row, previous_row, previous_rows, slot, mixed_stride, C, W: tl.constexpr
):  # fmt: skip
    """Read the raw input [channels] `back` rows from `row`: of the pass, of a slot, or zeros."""
    missing = -back - previous_rows  # > 0: so many rows before the oldest row that the pass holds
    values = tl.zeros(channels.shape, dtype=mixed.dtype.element_ty)
    if missing <= 0:
        source = tl.where(back >= 0, row + back, previous_row + back).to(tl.int64)
        values = tl.load(mixed + source * mixed_stride + channels)
    elif slot >= 0:
        base = states + slot.to(tl.int64) * C * (W - 1) + W - 1 - missing
        values = tl.load(base + channels * (W - 1)).to(mixed.dtype.element_ty)
    return values


@triton.jit
def _gates(
    b, a, a_log, dt_bias, g, beta, t, live, b_stride, a_stride, HV: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Decay and write strength of every value head at the rows t."""
    offs_h = tl.arange(0, BLOCK_H)
    mask = live[:, None] & (offs_h < HV)[None, :]
    logits = tl.load(a + t[:, None] * a_stride + offs_h[None, :], mask=mask, other=0.0).to(tl.float32)
    logits += tl.load(dt_bias + offs_h, mask=offs_h < HV, other=0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(a_log + offs_h, mask=offs_h < HV, other=0.0).to(tl.float32))
    # softplus without overflow: max(x, 0) + log(1 + exp(-|x|))
    decay = -rate[None, :] * (tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits))))
    strength = tl.load(b + t[:, None] * b_stride + offs_h[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(g + t[:, None] * HV + offs_h[None, :], decay, mask=mask)
    tl.store(beta + t[:, None] * HV + offs_h[None, :], tl.sigmoid(strength), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _prepare_kernel(
    mixed, b, a, weight, states, a_log, dt_bias, q, k, v, g, beta, tiles,
    mixed_stride, b_stride, a_stride, eps,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    BLOCK_H: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile, block of K channels): q heads, then k heads, then v; the last one computes the gates."""
    entry = tiles + tl.program_id(0) * COLUMNS
    row = tl.load(entry)
    rows = tl.load(entry + 1)
    previous_row = tl.load(entry + 2)
    previous_rows = tl.load(entry + 3)
    slot = tl.load(entry + 4)
    final_slot = tl.load(entry + 5)
    if rows == 0:
        return
    block = tl.program_id(1)
    offs_t = tl.arange(0, TILE)
    live = offs_t < rows
    t = (row + offs_t).to(tl.int64)
    if block == C // K:
        _gates(b, a, a_log, dt_bias, g, beta, t, live, b_stride, a_stride, HV, BLOCK_H)
        return

    channels = block * K + tl.arange(0, K)
    acc = tl.zeros([TILE, K], dtype=tl.float32)
    for back in tl.static_range(W):
        tap = tl.load(weight + channels * W + (W - 1 - back)).to(tl.float32)
        offs_back = offs_t - back
        source = tl.where(offs_back >= 0, row + offs_back, previous_row + offs_back).to(tl.int64)
        in_pass = live & (offs_back + previous_rows >= 0)
        tile = tl.load(
            mixed + source[:, None] * mixed_stride + channels[None, :], mask=in_pass[:, None], other=0.0
        )
        # Said outright: a compiler may fuse one of two sums and not the other, and a tap in FP32 shows which.
        acc = tl.fma(tl.broadcast_to(tap[None, :], [TILE, K]), tile.to(tl.float32), acc)
    if slot >= 0:  # the first rows of a segment also see the columns of a slot
        base = states + slot.to(tl.int64) * C * (W - 1)
        for newer in tl.static_range(
            W - 1
        ):  # newest first, as above: cached or read, a row has the same bits
            column = W - 2 - newer
            history = tl.load(base + channels * (W - 1) + column).to(tl.float32)
            for back in tl.static_range(1, W):
                tap = tl.load(weight + channels * W + (W - 1 - back)).to(tl.float32)
                sees = back - offs_t - previous_rows == W - 1 - column
                seen = tl.where(sees[:, None], history[None, :], 0.0)
                acc = tl.fma(tl.broadcast_to(tap[None, :], [TILE, K]), seen, acc)
    acc = acc * tl.sigmoid(acc)
    if block < 2 * HK:
        acc = acc * tl.rsqrt(tl.sum(acc * acc, axis=1) + eps)[:, None]
        if block < HK:
            target = q + t[:, None] * (HK * K) + channels[None, :]
        else:
            target = k + t[:, None] * (HK * K) + (channels - HK * K)[None, :]
    else:
        target = v + t[:, None] * (C - 2 * HK * K) + (channels - 2 * HK * K)[None, :]
    tl.store(target, acc.to(q.dtype.element_ty), mask=live[:, None])

    if final_slot >= 0:
        base = states + final_slot.to(tl.int64) * C * (W - 1)
        for column in tl.static_range(W - 1):  # the newest row goes last
            values = _raw_row(
                mixed, states, rows - (W - 1) + column, channels, row, previous_row, previous_rows, slot,
                mixed_stride, C, W,
            )  # fmt: skip
            tl.store(base + channels * (W - 1) + column, values.to(states.dtype.element_ty))


def gdn_prepare(
    mixed: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_states: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    plan: RecurrencePlan,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute q, k, v, g and beta of every row, and leave each final convolution state in its slot.

    `q, k = l2norm(silu(conv(.)))`, `v = silu(conv(.))`, `g = -exp(A_log) · softplus(a + dt_bias)`,
    `beta = sigmoid(b)` (the gated delta rule of Qwen3.5, after Yang et al. 2024). Sums are in float32. Rows
    that no segment holds are left unwritten.

    Args:
        mixed: [T, C] with C = 2·key_heads·key_dim + value_heads·value_dim: the rows before the convolution.
            Rows may be strided, as in a slice of a wider projection.
        b, a: [T, value_heads], rows may be strided.
        conv_weight: [C, W], the newest tap last.
        conv_states: [slots, C, W-1], the newest row in the last column; read at initial slots, written at
            final slots.
        A_log, dt_bias: [value_heads].
        plan: the pass.

    Returns:
        q, k [T, key_heads, key_dim] and v [T, value_heads, value_dim] in mixed's dtype, g and beta
        [T, value_heads] float32.

    Raises:
        ValueError: a shape or layout that the kernel does not read.
    """
    T, C = mixed.shape
    width = conv_weight.shape[1]
    if 2 * key_heads * key_dim + value_heads * value_dim != C or conv_states.shape[1:] != (C, width - 1):
        raise ValueError(
            f"{C} channels and conv states {tuple(conv_states.shape)} do not fit {key_heads} key heads "
            f"of {key_dim}, {value_heads} value heads of {value_dim} and a convolution of width {width}"
        )
    if key_dim & (key_dim - 1) or value_heads * value_dim % key_dim:
        raise ValueError(f"key_dim {key_dim} must be a power of two that divides the {C} channels")
    if width - 1 > TILE:
        raise ValueError(f"a convolution of width {width} reaches back further than {TILE} rows")
    if not (conv_weight.is_contiguous() and conv_states.is_contiguous()):
        raise ValueError("conv_weight and conv_states must be contiguous")
    q = mixed.new_empty(T, key_heads, key_dim)
    k = torch.empty_like(q)
    v = mixed.new_empty(T, value_heads, value_dim)
    g = torch.empty(T, value_heads, dtype=torch.float32, device=mixed.device)
    beta = torch.empty_like(g)
    _prepare_kernel[(plan.tiles.shape[0], C // key_dim + 1)](
        mixed, b, a, conv_weight, conv_states, A_log, dt_bias, q, k, v, g, beta, plan.tiles,
        mixed.stride(0), b.stride(0), a.stride(0), NORM_EPS,
        HK=key_heads, HV=value_heads, K=key_dim, C=C, W=width,
        BLOCK_H=triton.next_power_of_2(value_heads), TILE=TILE, COLUMNS=TILE_COLUMNS,
    )  # fmt: skip
    return q, k, v, g, beta
