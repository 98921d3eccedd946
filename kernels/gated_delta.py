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

from d3serve.kernels import cards
from d3serve.kernels.cards import Card
from d3serve.kernels.recurrence_plan import CHUNK, CHUNK_COLUMNS, PIECE_COLUMNS, RecurrencePlan

CHUNK_REGISTERS = 168  # lets a multiprocessor hold three programs of _chunk_kernel, which spill nothing yet
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _join(inverses, A, level: tl.constexpr, i, j, PRECISION: tl.constexpr):
    """Inverses of the diagonal blocks of 2 ** (level + 1) rows of I + A, from those of 2 ** level rows.

    With C below two neighbours P and R: [[P, 0], [C, R]]^-1 = [[P^-1, 0], [-R^-1 C P^-1, R^-1]]. Unlike a
    series in powers of A this never forms numbers larger than the answer's.
    """
    below = (i >> level != j >> level) & (i >> (level + 1) == j >> (level + 1))
    right = tl.dot(tl.where(below, A, 0.0), inverses, input_precision=PRECISION)
    return inverses - tl.dot(inverses, right, input_precision=PRECISION)


@triton.jit
def _inverse(A, i, j, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower [64, 64] A: its four diagonal blocks side by side, then joined."""
    four = tl.arange(0, 4)
    on_diagonal = four[:, None, None, None] == four[None, None, :, None]
    blocks = tl.sum(tl.where(on_diagonal, tl.reshape(A, [4, 16, 4, 16]), 0.0), axis=2)
    block_i = tl.arange(0, 16)[None, :, None]
    block_j = tl.arange(0, 16)[None, None, :]
    pairs = (block_i >> 1 == block_j >> 1) & (block_i > block_j)
    small = tl.where(block_i == block_j, 1.0, 0.0) - tl.where(pairs, blocks, 0.0)
    for level in tl.static_range(1, 4):
        small = _join(small, blocks, level, block_i, block_j, PRECISION)
    whole = tl.reshape(tl.where(on_diagonal, small[:, :, None, :], 0.0), [64, 64])
    for level in tl.static_range(4, 6):
        whole = _join(whole, A, level, i, j, PRECISION)
    return whole


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["chunks"])
def _chunk_kernel(
    q, k, v, g, beta, w, u, p, decay, chunks, first, scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
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
    t = row.to(tl.int64)  # 64-bit once: offsets inside a chunk are small
    tile = tl.program_id(0).to(tl.int64) * HV + head
    i = offs[:, None]
    j = offs[None, :]

    gates = t * HV + head
    total = tl.cumsum(tl.load(g + gates + offs * HV, mask=live, other=0.0) * LOG2_E, axis=0)
    strength = tl.load(beta + gates + offs * HV, mask=live, other=0.0)
    keys = (t * HK + head // (HV // HK)) * K
    key_offs = i * (HK * K) + offs_k[None, :]
    b_k = tl.load(k + keys + key_offs, mask=live[:, None], other=0.0)
    fade = tl.exp2(tl.where(i >= j, total[:, None] - total[None, :], float("-inf")))

    b_q = tl.load(q + keys + key_offs, mask=live[:, None], other=0.0)
    b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * fade * scale
    tl.store(p + tile * CHUNK * CHUNK + i * CHUNK + j, b_p.to(p.dtype.element_ty))
    tl.store(decay + tile * CHUNK + offs, total)
    A = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * fade * strength[:, None]
    X = _inverse(tl.where(i > j, A, 0.0), i, j, PRECISION) * strength[None, :]

    b_v = tl.load(v + gates * V + i * (HV * V) + offs_v[None, :], mask=live[:, None], other=0.0)
    b_u = tl.dot(X.to(b_v.dtype), b_v, input_precision=PRECISION)
    tl.store(u + tile * CHUNK * V + i * V + offs_v[None, :], b_u.to(u.dtype.element_ty))
    X = X * tl.exp2(total)[None, :]
    b_w = tl.dot(X.to(b_k.dtype), b_k, input_precision=PRECISION)
    tl.store(w + tile * CHUNK * K + i * K + offs_k[None, :], b_w.to(w.dtype.element_ty))


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
    key_offs = offs[:, None] * (HK * K) + offs_k[None, :]

    state = tl.zeros([K, BLOCK_V], dtype=tl.float32)
    if initial >= 0:
        state = tl.load(states + initial.to(tl.int64) * (HV * K * V) + state_offs)
    elif initial < -1:
        state = tl.load(carry + (-2 - initial) * (HV * K * V) + state_offs)

    for c in range(tl.cdiv(length, CHUNK)):
        live = c * CHUNK + offs < length
        t = (row + c * CHUNK).to(tl.int64)  # 64-bit once: offsets inside a chunk are small
        keys = (t * HK + head // (HV // HK)) * K
        tile = (first_chunk + c).to(tl.int64) * HV + head
        total = tl.load(decay + tile * CHUNK + offs)
        last = tl.load(decay + tile * CHUNK + CHUNK - 1)

        rounded = state.to(w.dtype.element_ty)
        new = tl.load(u + tile * CHUNK * V + offs[:, None] * V + offs_v[None, :]).to(tl.float32)
        b_w = tl.load(w + tile * CHUNK * K + offs[:, None] * K + offs_k[None, :])
        new -= tl.dot(b_w, rounded, input_precision=PRECISION)
        b_q = tl.load(q + keys + key_offs, mask=live[:, None], other=0.0)
        b_o = tl.dot(b_q, rounded, input_precision=PRECISION) * (scale * tl.exp2(total))[:, None]
        b_p = tl.load(p + tile * CHUNK * CHUNK + offs[:, None] * CHUNK + offs[None, :])
        b_o = tl.dot(b_p, new.to(b_p.dtype), b_o, input_precision=PRECISION)
        tl.store(
            out + (t * HV + head) * V + offs[:, None] * (HV * V) + offs_v[None, :],
            b_o.to(out.dtype.element_ty),
            mask=live[:, None],
        )
        b_k = tl.load(k + keys + key_offs, mask=live[:, None], other=0.0)
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
    precision = "tf32x3" if exact else "tf32"  # of float32 operands; the former keeps all their bits
    shape = {"HK": HK, "HV": HV, "K": K, "V": V, "CHUNK": CHUNK, "PRECISION": precision}
    block_v = min(V, 32 if exact else 64)
    for step in plan.steps:
        _chunk_kernel[(step.chunks, HV)](
            q, k, v, g, beta, w, u, p, decay, plan.chunks, step.first_chunk, scale,
            **shape, COLUMNS=CHUNK_COLUMNS, maxnreg=None if exact else CHUNK_REGISTERS,
        )  # fmt: skip
        for first, pieces in step.phases:
            if pieces:
                _walk_kernel[(pieces, HV * (V // block_v))](
                    q, k, w, u, p, decay, recurrent_states, carry, out, plan.pieces, first, scale,
                    **shape, COLUMNS=PIECE_COLUMNS, BLOCK_V=block_v,
                    **walk_options(K, block_v, q.element_size(), cards.card(q.device)),
                )  # fmt: skip
    return out


def walk_options(K: int, block_v: int, item_bytes: int, card: Card) -> dict[str, int]:
    """Warps of a walking program, and chunks in flight that fit the card's shared memory: three on a Hopper."""
    if card.feeds_from_shared:
        stage_bytes = CHUNK * ((3 * K + block_v + CHUNK) * item_bytes + 4)
        stages = (card.shared_bytes - K * block_v * item_bytes) // stage_bytes
        return {"num_warps": 4, "num_stages": max(1, min(3, stages))}
    # The chunk at work is in registers, and four warps would spill the state. A third stage fits an A100 and spills.
    ahead_bytes = CHUNK * (3 * K * item_bytes + 4) + 4
    spare_bytes = card.shared_bytes - (K + CHUNK) * block_v * item_bytes
    return {"num_warps": 8, "num_stages": 2 if ahead_bytes <= spare_bytes else 1}


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
