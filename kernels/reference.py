"""Every operation of a pass in plain PyTorch: the oracle of the fast kernels, and the path of a CPU.

One set of `d3serve.kernels.operations.Operations`. Arithmetic is FP32 whatever the storage type; results
come back in the type of the first argument. Nothing here is fast on purpose: a reader should be able to
check each function against its formula by eye.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from d3serve.kernels.matrix import Float8Rows, Rows, quantize_rows
from d3serve.kernels.plain_products import float8_linear as float8_linear  # noqa: PLC0414  (part of the set)
from d3serve.kernels.plain_products import int4_linear as int4_linear  # noqa: PLC0414
from d3serve.kernels.plain_products import narrow_linear as narrow_linear  # noqa: PLC0414
from d3serve.kernels.segments import AttentionShape, Segment

QUERY_ROWS = 1024  # rows of one attention step: bounds its score matrix on long states
CHUNK = 64  # tokens of one step of the gated delta rule
NORM_EPS = 1e-6  # of the L2 norm of GDN queries and keys, in the reference model and in fla
embed = F.embedding  # a row of the table [vocab, h] for each token: [T, h]
captures = False  # there are no CUDA graphs of what runs on a CPU
least_rows = 1


class Plan(NamedTuple):
    """The segments of a pass, states first, and whether rows see only backwards in their own block."""

    segments: tuple[Segment, ...]
    causal: bool = False

    @property
    def partials(self) -> int:
        """Nothing is cut, so nothing waits to be merged."""
        return 0

    @property
    def pairs(self) -> int:
        """Pairs of a query row and a key that a full-attention layer attends."""
        return sum(s.length * (s.prefix_length + s.length) for s in self.segments)


def cut_attention(segments: Sequence[Segment], shape: AttentionShape) -> Plan:
    """Leave the segments as they are."""
    return Plan(tuple(segments), shape.causal)


def plan_attention(cut: Plan, shape: AttentionShape, *, sizes: object = None) -> Plan:  # noqa: ARG001 - as the kernels'
    """Leave the plan as it is; nothing here is padded."""
    return cut


def plan_recurrence(segments: Sequence[Segment], *, device: torch.device, sizes: object = None) -> Plan:  # noqa: ARG001 - as the kernels'
    """Leave the segments as they are."""
    return Plan(tuple(segments))


def prefix_bidir_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: Plan, *, softmax_scale: float
) -> Tensor:
    """Each segment's rows see its whole prefix and its own block: all of it, or backwards when causal.

    Args:
        q: [T, H, D] queries of every row of the pass.
        k_pool: [P, HK, D] keys of every pool row; query head h reads key/value head h // (H // HK).
        v_pool: [P, HK, D] values.
        plan: the pass.
        softmax_scale: factor of the scores, D ** -0.5 in these models.

    Returns:
        [T, H, D] in q's type; rows of no segment are zero.
    """
    out = torch.zeros_like(q)
    for _ in attention_steps(q, k_pool, v_pool, out, plan, softmax_scale=softmax_scale):
        pass
    return out


def attention_steps(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, plan: Plan, *, softmax_scale: float
) -> Iterator[int]:
    """Attend as `prefix_bidir_attention`, into `out` [T, H, D], at most `QUERY_ROWS` rows at a time.

    Yields, after each step, how many pairs of a query row and a key it was.
    """
    for segment in plan.segments:
        keys, values = (_visible(pool, segment) for pool in (k_pool, v_pool))
        for first in range(0, segment.length, QUERY_ROWS):
            count = min(QUERY_ROWS, segment.length - first)
            rows = slice(segment.start + first, segment.start + first + count)
            last_visible = segment.prefix_length + first if plan.causal else None
            out[rows] = _attend(q[rows], keys, values, last_visible, softmax_scale)
            yield count * len(keys)


def _visible(pool: Tensor, segment: Segment) -> Tensor:
    """Pool rows that a segment may see, prefix first: [prefix_length + length, HK, D] FP32."""
    prefix = pool[segment.prefix_start : segment.prefix_start + segment.prefix_length]
    own = pool[segment.own_start : segment.own_start + segment.length]
    return torch.cat((prefix, own)).float()


def _attend(q: Tensor, k: Tensor, v: Tensor, last_visible: int | None, scale: float) -> Tensor:
    """Attend from rows q to keys k, all of them or, where causal, up to `last_visible` of the first row."""
    T, H, D = q.shape
    S, HK, _ = k.shape
    k, v = k.permute(1, 2, 0), v.transpose(0, 1)  # [HK, D, S], [HK, S, D]
    heads = (q.float() * scale).view(T, HK, H // HK, D).permute(1, 2, 0, 3)
    scores = (heads.reshape(HK, -1, D) @ k).view(HK, -1, T, S)
    if last_visible is not None:
        last = last_visible + torch.arange(T, device=q.device)
        scores.masked_fill_(torch.arange(S, device=q.device) > last[:, None], float("-inf"))
    attended = (scores.softmax(dim=-1).view(HK, -1, S) @ v).view(HK, -1, T, D)
    return attended.permute(2, 0, 1, 3).reshape(T, H, D).to(q.dtype)


def gdn_prepare(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    conv_states: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    plan: Plan,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Convolve, activate and normalise the inputs of the gated delta rule; carry the conv state on.

    Args:
        mixed: [T, C] projected q | k | v, C = 2·key_heads·key_dim + value_heads·value_dim.
        b: [T, HV] before the sigmoid.
        a: [T, HV] before the softplus.
        conv_weight: [C, W]; the last column weighs the row itself.
        conv_states: [slots, C, W - 1], newest token in the last column; final slots are written.
        A_log: [HV] FP32.
        dt_bias: [HV] FP32.
        plan: the pass.
        key_heads: number of q and k heads.
        value_heads: HV.
        key_dim: width of a q or k head.
        value_dim: width of a v head.

    Returns:
        q, k [T, HK, K] of length 1, v [T, HV, V] in mixed's type; g = -exp(A_log)·softplus(a + dt_bias)
        and beta = sigmoid(b), both [T, HV] FP32.
    """
    convolved = F.silu(_causal_convolution(mixed, conv_weight, conv_states, plan))
    width = key_heads * key_dim
    q, k, v = convolved.split((width, width, value_heads * value_dim), dim=-1)
    q, k = (_unit(x.unflatten(-1, (key_heads, key_dim))) for x in (q, k))
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    v = v.unflatten(-1, (value_heads, value_dim))
    return q.to(mixed.dtype), k.to(mixed.dtype), v.to(mixed.dtype), g, b.float().sigmoid()


def _causal_convolution(mixed: Tensor, weight: Tensor, states: Tensor, plan: Plan) -> Tensor:
    """out[t, c] = Σ_w weight[c, w] · input[t - (W - 1) + w, c], inputs before a segment from its slot."""
    W = weight.shape[1]
    taps = weight.float().unbind(dim=1)
    out = torch.zeros(mixed.shape, dtype=torch.float32, device=mixed.device)
    for segment in plan.segments:
        rows = slice(segment.start, segment.start + segment.length)
        if segment.initial_slot < 0:
            history = mixed.new_zeros(W - 1, mixed.shape[1])
        else:
            history = states[segment.initial_slot].T.to(mixed.dtype)
        inputs = torch.cat((history, mixed[rows]))
        windows = (inputs[w : w + segment.length].float() for w in range(W))
        out[rows] = sum(tap * window for tap, window in zip(taps, windows, strict=True))
        if segment.final_slot >= 0:
            states[segment.final_slot] = inputs[len(inputs) - (W - 1) :].T
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPS)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_states: Tensor,
    plan: Plan,
    *,
    scale: float,
) -> Tensor:
    """Run the gated delta rule over each segment from its initial slot, chunk by chunk.

    Equal to `gated_delta_rule_by_token` up to rounding. Within a chunk of rows i, with S the state before
    it and G_i = Σ_{j≤i} g_j, the rows' corrections U solve the unit lower triangular system
    U_i + β_i Σ_{j<i} exp(G_i - G_j)(k_i·k_j) U_j = β_i (v_i - exp(G_i) k_i S); then
    o_i = scale·(exp(G_i) q_i S + Σ_{j≤i} exp(G_i - G_j)(q_i·k_j) U_j) and
    S' = exp(G_last) S + Σ_j exp(G_last - G_j) k_jᵀ U_j.

    Args:
        q: [T, HK, K], rows of length 1; value head h reads key head h // (HV // HK).
        k: [T, HK, K], rows of length 1.
        v: [T, HV, V].
        g: [T, HV] FP32, the log of the decay, at most 0.
        beta: [T, HV] FP32.
        recurrent_states: [slots, HV, K, V] FP32; final slots are written, initial ones only read.
        plan: the pass.
        scale: factor of the queries, K ** -0.5 in these models.

    Returns:
        [T, HV, V] in v's type; rows of no segment are zero.
    """
    q, k = (_per_value_head(x, v.shape[1]).float() * factor for x, factor in ((q, scale), (k, 1.0)))
    heads_first = [x.transpose(0, 1) for x in (q, k, v.float(), g, beta)]
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    for segment, state in _walk(recurrent_states, plan):
        S = state
        end = segment.start + segment.length
        for start in range(segment.start, end, CHUNK):
            rows = slice(start, min(start + CHUNK, end))
            o, S = _delta_chunk(*(x[:, rows] for x in heads_first), S)
            out[rows] = o.transpose(0, 1)
        _leave(recurrent_states, segment, S)
    return out.to(v.dtype)


def gated_delta_rule_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_states: Tensor,
    plan: Plan,
    *,
    scale: float,
) -> Tensor:
    """Run the rule by its definition: S ← exp(g)·S; S ← S + kᵀ·β(v - k·S); o = scale·q·S.

    Arguments and result are those of `gated_delta_rule`.
    """
    q, k = (_per_value_head(x, v.shape[1]).float() * factor for x, factor in ((q, scale), (k, 1.0)))
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    for segment, state in _walk(recurrent_states, plan):
        S = state
        for t in range(segment.start, segment.start + segment.length):
            S = S * g[t, :, None, None].exp()
            correction = beta[t, :, None] * (v[t].float() - torch.einsum("hk,hkv->hv", k[t], S))
            S = S + k[t, :, :, None] * correction[:, None, :]
            out[t] = torch.einsum("hk,hkv->hv", q[t], S)
        _leave(recurrent_states, segment, S)
    return out.to(v.dtype)


def _delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk of every head: q, k [HV, C, K], v [HV, C, V], g and beta [HV, C], S [HV, K, V]."""
    G = g.cumsum(dim=-1)
    pair = (G[:, :, None] - G[:, None, :]).tril().exp().tril()  # masked before exp: no overflow above
    seen = G.exp()[..., None]
    system = (beta[..., None] * (k @ k.mT) * pair).tril(-1)
    target = beta[..., None] * (v - seen * (k @ S))
    U = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    out = seen * (q @ S) + (q @ k.mT * pair) @ U
    left = (G[:, -1:] - G).exp()[..., None]
    return out, G[:, -1, None, None].exp() * S + (k * left).mT @ U


def _per_value_head(x: Tensor, value_heads: int) -> Tensor:
    return x.repeat_interleave(value_heads // x.shape[1], dim=1)


def _walk(states: Tensor, plan: Plan) -> Iterator[tuple[Segment, Tensor]]:
    """Each segment with the state it starts from: its slot's, or explicit zeros."""
    for segment in plan.segments:
        if segment.initial_slot < 0:
            yield segment, states.new_zeros(states.shape[1:])
        else:
            yield segment, states[segment.initial_slot]


def _leave(states: Tensor, segment: Segment, S: Tensor) -> None:
    if segment.final_slot >= 0:
        states[segment.final_slot] = S


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    float8: bool = False,
    both: bool = False,
) -> tuple[Rows, Tensor]:
    """Add `x` to the residual stream and normalise: rms(sum)·(1 + weight) [T, h] in x's type, and the sum in FP32.

    An FP32 `residual` is updated in place. Without one the stream is `x` itself. `float8` quantizes the normed rows;
    with `both` they are kept as they were, too.
    """
    if residual is None:
        total = x
    elif residual.dtype == torch.float32:
        total = residual.add_(x)
    else:
        total = residual.float() + x
    normed = (_rms(total, eps) * (1.0 + weight.float())).to(x.dtype)
    return _rows(normed, float8=float8, both=both), total


def _rows(x: Tensor, *, float8: bool, both: bool = False) -> Rows:
    return Float8Rows(*quantize_rows(x), x.dtype, x if both else None) if float8 else x


def _rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_mapping: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
) -> Tensor:
    """Normalise and rotate queries and keys; write K and V of each row into its pool row.

    Args:
        qkv: [T, (2·heads + 2·kv_heads)·D]: per query head q | gate, then the key heads, then the value heads.
        q_weight: [D], applied as 1 + weight.
        k_weight: [D], applied as 1 + weight.
        cos: [T, R], for the first R dims of a head (rotate-half layout).
        sin: [T, R].
        k_pool: [P, HK, D], written.
        v_pool: [P, HK, D], written.
        slot_mapping: [T] int64, each row's pool row; all at least 0, since nothing here is padded.
        heads: number of query heads; 0 when only K and V are wanted.
        kv_heads: HK.
        head_dim: D.
        eps: of the RMS norms.

    Returns:
        q [T, heads, D] in qkv's type.
    """
    T = len(qkv)
    per_head = qkv.view(T, 2 * heads + 2 * kv_heads, head_dim)
    q = per_head[:, : 2 * heads].reshape(T, heads, 2, head_dim)[:, :, 0]
    k, v = per_head[:, 2 * heads :].split(kv_heads, dim=1)
    k_pool[slot_mapping] = _rotate(_rms(k, eps) * (1.0 + k_weight.float()), cos, sin).to(k_pool.dtype)
    v_pool[slot_mapping] = v.to(v_pool.dtype)
    return _rotate(_rms(q, eps) * (1.0 + q_weight.float()), cos, sin).to(qkv.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos.float()[:, None] + half * sin.float()[:, None], rest), dim=-1)


def sigmoid_gate(attn: Tensor, qkv: Tensor) -> Tensor:
    """Attn [T, H, D] times the sigmoid of its gate, read from `qkv` as laid out above: [T, H·D]."""
    T, H, D = attn.shape
    gate = qkv[:, : 2 * H * D].view(T, H, 2, D)[:, :, 1]
    return (attn.float() * gate.float().sigmoid()).to(attn.dtype).view(T, H * D)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms(x)·weight·silu(z) per value head: x [T, HV, V], z [T, HV·V], weight [V] -> [T, HV·V]."""
    normed = _rms(x, eps) * weight.float() * F.silu(z.float().view(x.shape))
    return normed.to(x.dtype).flatten(1)


def silu_mul(gate_up: Tensor, *, float8: bool = False) -> Rows:
    """silu(gate)·up of gate_up [T, 2F] = gate | up: [T, F]; `float8` quantizes its rows."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _rows((F.silu(gate.float()) * up.float()).to(gate_up.dtype), float8=float8)
