"""The small steps between the matrix products of a layer, each as one launch.

All of them move bytes: a row is read once, its sums are in float32, and it is rounded once on the way out.
Inputs may be slices of a wider projection: rows strided, the inner dimension contiguous.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from d3serve.kernels.float8 import empty_rows, scale_of, to_float8
from d3serve.kernels.matrix import Float8Rows

BLOCK_F = 1024  # columns that one program of silu_mul works on
ROWS = 8  # (row, head) pairs that one program of the per-head kernels works on


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, normed, row_scales, plain, total, x_stride, h, eps,
    ADD: tl.constexpr, FLOAT8: tl.constexpr, BOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < h
    values = tl.load(x + row * x_stride + offs, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * h + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + row * h + offs, values, mask=mask)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / h + eps)
    gain = 1.0 + tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    out = (values * scale * gain).to(x.dtype.element_ty)
    if BOTH:
        tl.store(plain + row * h + offs, out, mask=mask)
    if FLOAT8:
        out = out.to(tl.float32)
        row_scale = scale_of(tl.max(tl.abs(out), axis=0))
        tl.store(row_scales + row, row_scale)
        out = to_float8(out, row_scale)
    tl.store(normed + row * h + offs, out, mask=mask)


@triton.jit
def _embed_kernel(tokens, table, out, h, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    found = tl.load(table + tl.load(tokens + row) * h + offs, mask=offs < h, other=0.0)
    tl.store(out + row * h + offs, found, mask=offs < h)


def embed(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Take a row of the table [vocab, h] for each token: [T, h] where the tokens are.

    The table may stand in pinned memory of the host: the GPU reads its rows over the bus, and no bit of them changes.
    """
    T, h = len(tokens), table.shape[1]
    out = torch.empty(T, h, dtype=table.dtype, device=tokens.device)
    if T:
        _embed_kernel[(T,)](tokens, table, out, h, BLOCK=triton.next_power_of_2(h))
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    float8: bool = False,
    both: bool = False,
) -> tuple[torch.Tensor | Float8Rows, torch.Tensor]:
    """Add `x` to the residual stream and normalise the sum: `rms(x + residual) · (1 + weight)`.

    Args:
        x: [T, h], rows may be strided.
        residual: [T, h] contiguous, updated in place if it is FP32; None at the first layer, where the stream is `x`.
        weight: [h].
        eps: inside the root.
        float8: quantize the normed rows, rounded to x's dtype, while they are at hand.
        both: write what was quantized as well, for a plain weight.

    Returns:
        (normed, stream): [T, h] in x's dtype, and [T, h] in FP32, or `x` when residual is None. A stream in BF16
        would lose a bit at each of 128 sums; that alone is most of the error of a BF16 pass.
    """
    T, h = x.shape
    plain = torch.empty(T, h, dtype=x.dtype, device=x.device) if both or not float8 else None
    rows = replace(empty_rows(T, h, x), plain=plain) if float8 else None
    values, row_scales = (plain, None) if rows is None else (rows.values, rows.scale)
    total = x if residual is None else residual
    if residual is not None and residual.dtype != torch.float32:
        total = torch.empty(T, h, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(h)
    _add_rms_norm_kernel[(T,)](
        x, residual, weight, values, row_scales, plain, total, x.stride(0), h, eps,
        ADD=residual is not None, FLOAT8=float8, BOTH=float8 and both,
        BLOCK=block, num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return plain if rows is None else rows, total


# the last layer slices off the state rows: where that cuts must not compile another kernel
@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slots"])
def _qk_norm_rope_store_kernel(
    qkv, q_weight, k_weight, cos, sin, q, k_pool, v_pool, slots, T, qkv_stride, cos_stride, eps,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (rows, head): heads 0..H are queries, ..H+HK keys, ..H+2HK values."""
    head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK_D)
    live = t < T
    mask = live[:, None] & (offs < D)[None, :]
    is_query = head < H
    column = tl.where(is_query, 2 * head, H + head) * D
    source = qkv + t[:, None] * qkv_stride + column
    x = tl.load(source + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    if is_query:
        target = q + t[:, None] * (H * D) + head * D
        stored = mask
    else:
        slot = tl.load(slots + t, mask=live, other=-1)
        target = tl.where(head < H + HK, k_pool, v_pool) + slot[:, None] * (HK * D) + ((head - H) % HK) * D
        stored = mask & (slot >= 0)[:, None]

    if head < H + HK:
        weight = tl.where(is_query, q_weight, k_weight)
        # lane d of the rotated part meets lane d ± R/2: read it again, from the cache
        other = tl.where(offs < R // 2, offs + R // 2, tl.where(offs < R, offs - R // 2, offs))
        sign = tl.where(offs < R // 2, -1.0, tl.where(offs < R, 1.0, 0.0))
        y = tl.load(source + other[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = x * scale * (1.0 + tl.load(weight + offs, mask=offs < D, other=0.0).to(tl.float32))[None, :]
        y = y * scale * (1.0 + tl.load(weight + other, mask=offs < D, other=0.0).to(tl.float32))[None, :]
        angle = t[:, None] * cos_stride + offs[None, :]
        turned = live[:, None] & (offs < R)[None, :]
        b_cos = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
        b_sin = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
        x = x * b_cos + y * (b_sin * sign[None, :])
    tl.store(target + offs[None, :], x.to(q.dtype.element_ty), mask=stored)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
) -> torch.Tensor:
    """Normalise and rotate q and k of every row, and write k and v straight into the pools.

    RMS norm per head with gain `1 + weight`, then the rotary embedding on the first R lanes (halves
    rotated, as in GPT-NeoX).

    Args:
        qkv: [T, (2·heads + 2·kv_heads)·head_dim], rows may be strided: per query head q then gate, then the
            key heads, then the value heads.
        q_weight, k_weight: [head_dim].
        cos, sin: [T, R] with R <= head_dim, of one row stride.
        k_pool, v_pool: [P, kv_heads, head_dim] contiguous, in qkv's dtype.
        slot_mapping: int64 [T]: each row's pool row; -1 writes nothing.
        heads: query heads; 0 when only K and V are wanted.
        kv_heads: key heads, and value heads.
        head_dim: lanes of a head.
        eps: of both norms.

    Returns:
        q [T, heads, head_dim] in qkv's dtype.

    Raises:
        ValueError: pools of another dtype or layout, or cos and sin of different strides.
    """
    T = qkv.shape[0]
    if not (k_pool.is_contiguous() and v_pool.is_contiguous()) or {k_pool.dtype, v_pool.dtype} != {qkv.dtype}:
        raise ValueError(f"the pools must be contiguous {qkv.dtype}, got {k_pool.dtype} and {v_pool.dtype}")
    if cos.stride() != sin.stride():
        raise ValueError(f"cos and sin must share their strides, got {cos.stride()} and {sin.stride()}")
    q = torch.empty(T, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _qk_norm_rope_store_kernel[(triton.cdiv(T, ROWS), heads + 2 * kv_heads)](
        qkv, q_weight, k_weight, cos, sin, q, k_pool, v_pool, slot_mapping, T,
        qkv.stride(0), cos.stride(0), eps, H=heads, HK=kv_heads, D=head_dim, R=cos.shape[1],
        ROWS=ROWS, BLOCK_D=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize=["T"])
def _sigmoid_gate_kernel(
    attn, qkv, out, T, qkv_stride, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK_D)
    mask = (t < T)[:, None] & (offs < D)[None, :]
    gate = tl.load(qkv + t[:, None] * qkv_stride + (2 * head + 1) * D + offs[None, :], mask=mask, other=0.0)
    where = t[:, None] * (H * D) + head * D + offs[None, :]
    values = tl.load(attn + where, mask=mask, other=0.0).to(tl.float32) * tl.sigmoid(gate.to(tl.float32))
    tl.store(out + where, values.to(out.dtype.element_ty), mask=mask)


def sigmoid_gate(attn: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
    """Gate attention's output: `attn · sigmoid(gate)`.

    Args:
        attn: [T, H, D] contiguous.
        qkv: the projection that `qk_norm_rope_store` read, which holds each head's gate beside its q.

    Returns:
        [T, H·D] in attn's dtype.
    """
    T, H, D = attn.shape
    out = torch.empty(T, H * D, dtype=attn.dtype, device=attn.device)
    _sigmoid_gate_kernel[(triton.cdiv(T, ROWS), H)](
        attn, qkv, out, T, qkv.stride(0), H=H, D=D, ROWS=ROWS, BLOCK_D=triton.next_power_of_2(D)
    )
    return out


@triton.jit(do_not_specialize=["T"])
def _gated_rms_norm_kernel(
    x, z, weight, out, T, z_stride, eps,
    HV: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # (row, head), in storage order of x
    t = pair // HV
    offs = tl.arange(0, BLOCK_V)
    mask = (t < T)[:, None] & (offs < V)[None, :]
    values = tl.load(x + pair[:, None] * V + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / V + eps)
    gain = tl.load(weight + offs, mask=offs < V, other=0.0).to(tl.float32)
    gate = tl.load(z + t[:, None] * z_stride + (pair % HV)[:, None] * V + offs[None, :], mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    values = values * scale[:, None] * gain[None, :] * (gate * tl.sigmoid(gate))
    tl.store(out + pair[:, None] * V + offs[None, :], values.to(out.dtype.element_ty), mask=mask)


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each value head and gate it: `rms(x) · weight · silu(z)`, in float32.

    Args:
        x: [T, HV, V] contiguous.
        z: [T, HV·V], rows may be strided.
        weight: [V], shared by the heads; the gain is `weight`, not `1 + weight`.
        eps: inside the root.

    Returns:
        [T, HV·V] in x's dtype.
    """
    T, HV, V = x.shape
    out = torch.empty(T, HV * V, dtype=x.dtype, device=x.device)
    _gated_rms_norm_kernel[(triton.cdiv(T * HV, ROWS),)](
        x, z, weight, out, T, z.stride(0), eps, HV=HV, V=V, ROWS=ROWS, BLOCK_V=triton.next_power_of_2(V)
    )
    return out


@triton.jit
def _activated(gate_up, F, offs):
    """silu(gate)·up of some columns of one row, FP32; zero beyond F."""
    gate = tl.load(gate_up + offs, mask=offs < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + F + offs, mask=offs < F, other=0.0).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _activated(gate_up + row * stride, F, offs)
    tl.store(out + row * F + offs, values.to(out.dtype.element_ty), mask=offs < F)


@triton.jit
def _silu_mul_float8_kernel(gate_up, values, scale, stride, F, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """One row held in registers, so that it is read once: its first HEAD columns and at most TAIL more."""
    row = tl.program_id(0).to(tl.int64)
    head, tail = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    first = _activated(gate_up + row * stride, F, head).to(gate_up.dtype.element_ty).to(tl.float32)
    rest = _activated(gate_up + row * stride, F, tail).to(gate_up.dtype.element_ty).to(tl.float32)
    row_scale = scale_of(tl.maximum(tl.max(tl.abs(first), axis=0), tl.max(tl.abs(rest), axis=0)))
    tl.store(scale + row, row_scale)
    tl.store(values + row * F + head, to_float8(first, row_scale))
    tl.store(values + row * F + tail, to_float8(rest, row_scale), mask=tail < F)


def silu_mul(gate_up: torch.Tensor, *, float8: bool = False) -> torch.Tensor | Float8Rows:
    """Activate a gated MLP: `silu(gate) · up` from one projection.

    Args:
        gate_up: [T, 2F], gate first, rows may be strided.
        float8: quantize the rows, rounded to gate_up's dtype, while they are at hand.

    Returns:
        [T, F] in gate_up's dtype.
    """
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    if float8:
        rows, head = empty_rows(T, F, gate_up), 1 << (F.bit_length() - 1)
        _silu_mul_float8_kernel[(T,)](
            gate_up, rows.values, rows.scale, gate_up.stride(0), F,
            HEAD=head, TAIL=triton.next_power_of_2(max(1, F - head)), num_warps=min(16, max(4, head // 1024)),
        )  # fmt: skip
        return rows
    out = torch.empty(T, F, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(T, triton.cdiv(F, BLOCK_F))](gate_up, out, gate_up.stride(0), F, BLOCK=BLOCK_F)
    return out
