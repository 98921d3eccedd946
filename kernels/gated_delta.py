"""gated_delta_rule: the chunked gated delta rule over a packed pass, states first, then their questions.

Per value head, with S [K, V] in float32 and rows t = 1, 2, ... of a segment (Yang, Kautz and Hatamizadeh
2024, "Gated Delta Networks"):

    S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - exp(g_t) k_t S_{t-1}),      o_t = scale · q_t S_t

Inside a chunk of 64 rows with G the running sum of g, D_ij = exp(G_i - G_j) for i >= j, and A the strictly
lower part of beta_i (k_i · k_j) D_ij, the same numbers come from matrix products:

    X = (I + A)^-1 diag(beta),  U = X V,  W = X diag(exp G) K                  (no state: all chunks at once)
    N = U - W S,  O = scale (diag(exp G) Q S + (Q K^T * D) N),  S <- exp(G_64) S + K^T diag(exp(G_64 - G)) N

So one launch prepares X's products for every chunk of the pass, and one launch per phase walks the states.
The walk writes the output itself: the states between chunks never leave the registers.
"""

import torch
import triton
import triton.language as tl

from d3serve.kernels.recurrence_plan import CHUNK, CHUNK_COLUMNS, PIECE_COLUMNS, RecurrencePlan

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _inverse(A, i, j, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower [64, 64] A, by joining inverted diagonal blocks of 1, 2, 4, ... rows.

    Two neighbours P, R with C below P: [[P, 0], [C, R]]^-1 = [[P^-1, 0], [-R^-1 C P^-1, R^-1]]. Unlike the
    series in powers of A it never forms numbers larger than the answer's.
    """
    B = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), A, 0.0)
    for level in tl.static_range(1, 6):
        below = (i >> level != j >> level) & (i >> (level + 1) == j >> (level + 1))
        joined = tl.where(below, A, 0.0)
        right = tl.dot(joined, B, input_precision=PRECISION)
        B -= tl.dot(B, right, input_precision=PRECISION)
    return B


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["chunks"])
def _chunk_kernel(
    q, k, v, g, beta, w, u, p, decay, chunks, first, scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, value head): what a chunk needs besides the state it starts from."""
    entry = chunks + (first + tl.program_id(0)) * COLUMNS
    head = tl.program_id(1)
    row = tl.load(entry)
    rows = tl.load(entry + 1)
    if rows == 0:
        return
    offs = tl.arange(0, CHUNK)
    offs_k = tl.arange(0, K)
    offs_v = tl.arange(0, V)
    live = offs < rows
    t = (row + offs).to(tl.int64)
    tile = tl.program_id(0).to(tl.int64) * HV + head
    i = offs[:, None]
    j = offs[None, :]

    total = tl.cumsum(tl.load(g + t * HV + head, mask=live, other=0.0) * LOG2_E, axis=0)
    strength = tl.load(beta + t * HV + head, mask=live, other=0.0)
    key_offs = t[:, None] * (HK * K) + (head // (HV // HK)) * K + offs_k[None, :]
    b_k = tl.load(k + key_offs, mask=live[:, None], other=0.0)
    fade = tl.exp2(tl.where(i >= j, total[:, None] - total[None, :], float("-inf")))

    A = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * fade * strength[:, None]
    X = _inverse(tl.where(i > j, A, 0.0), i, j, INVERSE_PRECISION) * strength[None, :]

    b_v = tl.load(v + t[:, None] * (HV * V) + head * V + offs_v[None, :], mask=live[:, None], other=0.0)
    b_u = tl.dot(X.to(b_v.dtype), b_v, input_precision=PRECISION)
    tl.store(u + tile * CHUNK * V + i * V + offs_v[None, :], b_u.to(u.dtype.element_ty))
    X = X * tl.exp2(total)[None, :]
    b_w = tl.dot(X.to(b_k.dtype), b_k, input_precision=PRECISION)
    tl.store(w + tile * CHUNK * K + i * K + offs_k[None, :], b_w.to(w.dtype.element_ty))

    b_q = tl.load(q + key_offs, mask=live[:, None], other=0.0)
    b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * fade * scale
    tl.store(p + tile * CHUNK * CHUNK + i * CHUNK + j, b_p.to(p.dtype.element_ty))
    tl.store(decay + tile * CHUNK + offs, total)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["pieces"])
def _walk_kernel(
    q, k, w, u, p, decay, states, carry, out, pieces, first, scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (piece, value head x value block): walk a piece's chunks with the state in registers."""
    entry = pieces + (first + tl.program_id(0)) * COLUMNS
    length = tl.load(entry + 1)
    if length == 0:
        return
    head = tl.program_id(1) // (V // BLOCK_V)
    row = tl.load(entry)
    first_chunk = tl.load(entry + 2)
    initial = tl.load(entry + 3)
    final = tl.load(entry + 4)
    offs = tl.arange(0, CHUNK)
    offs_k = tl.arange(0, K)
    offs_v = (tl.program_id(1) % (V // BLOCK_V)) * BLOCK_V + tl.arange(0, BLOCK_V)
    state_offs = head * (K * V) + offs_k[:, None] * V + offs_v[None, :]

    state = tl.zeros([K, BLOCK_V], dtype=tl.float32)
    if initial >= 0:
        state = tl.load(states + initial.to(tl.int64) * (HV * K * V) + state_offs)
    elif initial < -1:
        state = tl.load(carry + (-2 - initial) * (HV * K * V) + state_offs)

    for c in range(tl.cdiv(length, CHUNK)):
        live = c * CHUNK + offs < length
        t = (row + c * CHUNK + offs).to(tl.int64)
        key_offs = t[:, None] * (HK * K) + (head // (HV // HK)) * K + offs_k[None, :]
        tile = (first_chunk + c).to(tl.int64) * HV + head
        wide = tile * CHUNK * K + offs[:, None] * K + offs_k[None, :]
        total = tl.load(decay + tile * CHUNK + offs)
        last = tl.load(decay + tile * CHUNK + CHUNK - 1)

        rounded = state.to(w.dtype.element_ty)
        new = tl.load(u + tile * CHUNK * V + offs[:, None] * V + offs_v[None, :]).to(tl.float32)
        new -= tl.dot(tl.load(w + wide), rounded, input_precision=PRECISION)
        b_q = tl.load(q + key_offs, mask=live[:, None], other=0.0)
        b_o = tl.dot(b_q, rounded, input_precision=PRECISION) * (scale * tl.exp2(total))[:, None]
        b_p = tl.load(p + tile * CHUNK * CHUNK + offs[:, None] * CHUNK + offs[None, :])
        b_o = tl.dot(b_p, new.to(b_p.dtype), b_o, input_precision=PRECISION)
        tl.store(
            out + t[:, None] * (HV * V) + head * V + offs_v[None, :],
            b_o.to(out.dtype.element_ty),
            mask=live[:, None],
        )
        b_k = tl.load(k + key_offs, mask=live[:, None], other=0.0)
        kept = (new * tl.exp2(last - total)[:, None]).to(b_k.dtype)
        state = tl.dot(tl.trans(b_k), kept, state * tl.exp2(last), input_precision=PRECISION)

    if final >= 0:
        tl.store(states + final.to(tl.int64) * (HV * K * V) + state_offs, state)
    elif final < -1:
        tl.store(carry + (-2 - final) * (HV * K * V) + state_offs, state)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    recurrent_states: torch.Tensor,
    plan: RecurrencePlan,
    *,
    scale: float,
) -> torch.Tensor:
    """Run the gated delta rule over every segment of the pass, each from its own initial state.

    Products take operands in q's dtype and sum in float32; the state is float32 throughout. A row's numbers
    depend on its own segment and its root alone, not on what else the pass holds. Rows that no segment
    holds are left unwritten.

    Args:
        q, k: [T, HK, K], L2-normalised; HV must be a multiple of HK, and a key head serves HV/HK value heads.
        v: [T, HV, V], q's dtype. K and V are powers of two from 16 to 128.
        g, beta: [T, HV] float32: log decay (<= 0) and write strength in [0, 1].
        recurrent_states: [slots, HV, K, V] float32; read at initial slots, written at final slots.
        plan: the pass.
        scale: of the output, K ** -0.5 in Qwen3.5.

    Returns:
        [T, HV, V] in v's dtype.

    Raises:
        ValueError: a shape, dtype or layout that the kernels do not read.
    """
    HK, K = q.shape[1:]
    HV, V = v.shape[1:]
    _check(q, k, v, g, beta, recurrent_states)
    out = torch.empty_like(v)
    tiles = max(step.chunks for step in plan.steps) * HV
    w = q.new_empty(tiles, CHUNK, K)
    u = v.new_empty(tiles, CHUNK, V)
    p = q.new_empty(tiles, CHUNK, CHUNK)
    decay = torch.empty(tiles, CHUNK, dtype=torch.float32, device=q.device)
    carry = recurrent_states.new_empty(2, HV, K, V) if len(plan.steps) > 1 else recurrent_states
    exact = q.dtype == torch.float32
    shape = {"HK": HK, "HV": HV, "K": K, "V": V, "CHUNK": CHUNK, "PRECISION": "ieee" if exact else "tf32"}
    stages = 1 if exact else 2  # float32 tiles are twice as large: two stages do not fit shared memory
    block_v = min(V, 32 if exact else 64)
    for step in plan.steps:
        _chunk_kernel[(step.chunks, HV)](
            q, k, v, g, beta, w, u, p, decay, plan.chunks, step.first_chunk, scale,
            **shape, COLUMNS=CHUNK_COLUMNS, INVERSE_PRECISION="ieee" if exact else "tf32", num_stages=stages,
        )  # fmt: skip
        for first, pieces in step.phases:
            if pieces:
                _walk_kernel[(pieces, HV * (V // block_v))](
                    q, k, w, u, p, decay, recurrent_states, carry, out, plan.pieces, first, scale,
                    **shape, COLUMNS=PIECE_COLUMNS, BLOCK_V=block_v, num_stages=stages,
                )  # fmt: skip
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    recurrent_states: torch.Tensor,
) -> None:
    """Refuse inputs that the kernels would read wrongly."""
    T, HK, K = q.shape
    HV, V = v.shape[1:]
    if k.shape != q.shape or v.shape[0] != T or HV % HK:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not belong together"
        )
    if {K, V} - {16, 32, 64, 128}:
        raise ValueError(f"head dims must be powers of two from 16 to 128, got K {K} and V {V}")
    if g.shape != (T, HV) or beta.shape != (T, HV) or {g.dtype, beta.dtype} != {torch.float32}:
        raise ValueError(f"g and beta must be [{T}, {HV}] float32")
    if recurrent_states.shape[1:] != (HV, K, V) or recurrent_states.dtype != torch.float32:
        raise ValueError(f"recurrent states must be [slots, {HV}, {K}, {V}] float32")
    if not all(x.is_contiguous() for x in (q, k, v, g, beta, recurrent_states)):
        raise ValueError("q, k, v, g, beta and recurrent_states must be contiguous")
