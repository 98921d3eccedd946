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
def _raw_rows(
    mixed,
    states,
    offs_back,
    channels,
    live,
    row,
    previous_row,
    previous_rows,
    slot,
    mixed_stride,
    C,
    W: tl.constexpr,
):
    """Raw inputs [rows, channels] in float32, `offs_back` rows from `row`: the pass's, a slot's, or zeros."""
    missing = -offs_back - previous_rows  # > 0: so many rows before the oldest row that the pass holds
    source = tl.where(offs_back >= 0, row + offs_back, previous_row + offs_back).to(tl.int64)
    in_pass = live & (missing <= 0)
    tile = tl.load(
        mixed + source[:, None] * mixed_stride + channels[None, :], mask=in_pass[:, None], other=0.0
    ).to(tl.float32)
    if slot >= 0:
        column = W - 1 - missing
        in_slot = live & (missing > 0) & (column >= 0)
        base = states + slot.to(tl.int64) * C * (W - 1)
        tile += tl.load(
            base + channels[None, :] * (W - 1) + column[:, None], mask=in_slot[:, None], other=0.0
        ).to(tl.float32)
    return tile


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _prepare_kernel(
    mixed, b, a, weight, states, a_log, dt_bias, q, k, v, g, beta, tiles,
    mixed_stride, b_stride, a_stride, eps,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile, head): heads 0..HK are q, ..2HK k, ..2HK+HV v, and one more computes both gates."""
    entry = tiles + tl.program_id(0) * COLUMNS
    rows = tl.load(entry + 1)
    if rows == 0:
        return
    head = tl.program_id(1)
    row = tl.load(entry)
    offs_t = tl.arange(0, TILE)
    live = offs_t < rows
    t = (row + offs_t).to(tl.int64)

    if head == 2 * HK + HV:
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
        return

    C: tl.constexpr = 2 * HK * K + HV * V
    offs_d = tl.arange(0, BLOCK_D)
    if head < 2 * HK:
        first, width = head * K, K
    else:
        first, width = 2 * HK * K + (head - 2 * HK) * V, V
    channels = first + offs_d
    in_head = offs_d < width
    channels = tl.where(in_head, channels, first)  # a padded lane repeats channel 0 and is never stored
    previous_row = tl.load(entry + 2)
    previous_rows = tl.load(entry + 3)
    slot = tl.load(entry + 4)

    acc = tl.zeros([TILE, BLOCK_D], dtype=tl.float32)
    for back in tl.static_range(W):
        tap = tl.load(weight + channels * W + (W - 1 - back)).to(tl.float32)
        acc += tap[None, :] * _raw_rows(
            mixed, states, offs_t - back, channels, live, row, previous_row, previous_rows, slot,
            mixed_stride, C, W,
        )  # fmt: skip
    acc = acc * tl.sigmoid(acc)

    mask = live[:, None] & in_head[None, :]
    if head < 2 * HK:
        squares = tl.sum(tl.where(in_head[None, :], acc * acc, 0.0), axis=1)
        acc = acc * tl.rsqrt(squares + eps)[:, None]
        if head < HK:
            pointers = q + t[:, None] * (HK * K) + channels[None, :]
        else:
            pointers = k + t[:, None] * (HK * K) + (channels - HK * K)[None, :]
    else:
        pointers = v + t[:, None] * (HV * V) + (channels - 2 * HK * K)[None, :]
    tl.store(pointers, acc.to(q.dtype.element_ty), mask=mask)

    final_slot = tl.load(entry + 5)
    if final_slot >= 0:
        offs_w = tl.arange(0, BLOCK_W)  # column W-2 is the newest row
        newest = _raw_rows(
            mixed, states, rows - (W - 1) + offs_w, channels, offs_w < W - 1, row, previous_row,
            previous_rows, slot, mixed_stride, C, W,
        )  # fmt: skip
        base = states + final_slot.to(tl.int64) * C * (W - 1)
        tl.store(
            base + channels[None, :] * (W - 1) + offs_w[:, None],
            newest.to(states.dtype.element_ty),
            mask=(offs_w < W - 1)[:, None] & in_head[None, :],
        )


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
    if width - 1 > TILE:
        raise ValueError(f"a convolution of width {width} reaches back further than {TILE} rows")
    if not (conv_weight.is_contiguous() and conv_states.is_contiguous()):
        raise ValueError("conv_weight and conv_states must be contiguous")
    q = mixed.new_empty(T, key_heads, key_dim)
    k = torch.empty_like(q)
    v = mixed.new_empty(T, value_heads, value_dim)
    g = torch.empty(T, value_heads, dtype=torch.float32, device=mixed.device)
    beta = torch.empty_like(g)
    _prepare_kernel[(plan.tiles.shape[0], 2 * key_heads + value_heads + 1)](
        mixed, b, a, conv_weight, conv_states, A_log, dt_bias, q, k, v, g, beta, plan.tiles,
        mixed.stride(0), b.stride(0), a.stride(0), NORM_EPS,
        HK=key_heads, HV=value_heads, K=key_dim, V=value_dim, W=width,
        BLOCK_D=triton.next_power_of_2(max(key_dim, value_dim)),
        BLOCK_H=triton.next_power_of_2(value_heads),
        BLOCK_W=triton.next_power_of_2(width - 1),
        TILE=TILE, COLUMNS=TILE_COLUMNS,
    )  # fmt: skip
    return q, k, v, g, beta
