"""The text backbone as it is trained: padded batches, states read once and fanned out to their questions.

The same mathematics as `model/backbone.py`, with autograd; parameters carry the names of the package.
Masks and states follow `prefix_bidir`: state rows see their state, question rows see their state and their
own block, linear layers run on from the state's last convolution inputs and recurrent state.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from demo.delta_rule import gated_delta_rule
from demo.prompts import Batch
from demo.questions import OPTIONS
from torch import Tensor, nn

from d3serve.model.config import CODES, Geometry


@dataclass(frozen=True)
class Rows:
    """What all layers of one pass share. Shapes as in `Batch`; M = B·Q question rows."""

    is_state: Tensor  # [B, S] bool, False on padding
    is_question: Tensor  # [M, N] bool
    state_rotary: tuple[Tensor, Tensor]  # cos and sin [B, S, R]
    question_rotary: tuple[Tensor, Tensor]  # [M, N, R]
    state_mask: Tensor  # [B, 1, S or 1, S] bool
    question_mask: Tensor  # [M, 1, N or 1, S + N] bool
    fan: int  # Q


@dataclass(frozen=True)
class Shown:
    """What a vision tower gives in place of some tokens of the states."""

    pads: Tensor  # [B, S] bool, as many in each state
    features: Tensor  # [B, pads of a state, hidden]


class RMSNorm(nn.Module):
    """rms(x)·(1 + weight), in FP32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight, self.eps)


def _linear(columns: int, rows: int, std: float) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


class FullAttention(nn.Module):
    """Gated attention with normed, partly rotated queries and keys."""

    def __init__(self, g: Geometry, out_std: float) -> None:
        super().__init__()
        self.g = g
        std = g.hidden**-0.5
        self.q_proj = _linear(g.hidden, 2 * g.heads * g.head_dim, std)
        self.k_proj = _linear(g.hidden, g.kv_heads * g.head_dim, std)
        self.v_proj = _linear(g.hidden, g.kv_heads * g.head_dim, std)
        self.o_proj = _linear(g.heads * g.head_dim, g.hidden, out_std)
        self.q_norm, self.k_norm = RMSNorm(g.head_dim, g.eps), RMSNorm(g.head_dim, g.eps)
        self._match_content()

    @torch.no_grad()
    def _match_content(self) -> None:
        """Let one query head of each group begin as its key head: rows that hold the same text find each other."""
        g = self.g
        queries = self.q_proj.weight.view(g.kv_heads, g.heads // g.kv_heads, 2, g.head_dim, g.hidden)
        queries[:, 0, 0] = self.k_proj.weight.view(g.kv_heads, g.head_dim, g.hidden)

    def forward(self, states: Tensor, questions: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Attend within states, and from questions to their state and themselves."""
        q, gate, k, v = self._project(states, rows.state_rotary)
        state_out = F.scaled_dot_product_attention(
            q, self._share(k), self._share(v), attn_mask=rows.state_mask
        )
        question_q, question_gate, own_k, own_v = self._project(questions, rows.question_rotary)
        keys, values = (
            self._share(torch.cat((seen.repeat_interleave(rows.fan, 0), own), dim=2))
            for seen, own in ((k, own_k), (v, own_v))
        )
        question_out = F.scaled_dot_product_attention(question_q, keys, values, attn_mask=rows.question_mask)
        return self._finish(state_out, gate), self._finish(question_out, question_gate)

    def _project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape = (*x.shape[:2], -1, self.g.head_dim)
        q, gate = self.q_proj(x).view(*x.shape[:2], -1, 2 * self.g.head_dim).chunk(2, dim=-1)
        k, v = self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        q, k = (
            _rotate(norm(each), *rotary).to(v.dtype).transpose(1, 2)
            for norm, each in ((self.q_norm, q), (self.k_norm, k))
        )
        return q, gate, k, v.transpose(1, 2)

    def _share(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.g.heads // self.g.kv_heads, dim=1)

    def _finish(self, attended: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = self.o_proj((attended.transpose(1, 2) * gate.sigmoid()).flatten(2))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos[:, :, None] + half * sin[:, :, None], kept), dim=-1)


class GatedNorm(nn.Module):
    """rms(x)·weight·silu(z), in FP32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Normalise and gate the last dimension."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps) * F.silu(z.float())


class LinearAttention(nn.Module):
    """The gated delta rule after a short causal convolution."""

    def __init__(self, g: Geometry, out_std: float) -> None:
        super().__init__()
        self.g = g
        std, values = g.hidden**-0.5, g.linear_value_heads * g.linear_value_dim
        self.in_proj_qkv = _linear(g.hidden, g.conv_channels, std)
        self.in_proj_z = _linear(g.hidden, values, std)
        self.in_proj_b = _linear(g.hidden, g.linear_value_heads, std)
        self.in_proj_a = _linear(g.hidden, g.linear_value_heads, std)
        self.conv1d = nn.Conv1d(
            g.conv_channels, g.conv_channels, g.conv_width, groups=g.conv_channels, bias=False
        )
        self.A_log = nn.Parameter(torch.empty(g.linear_value_heads).uniform_(1, 16).log())
        steps = torch.empty(g.linear_value_heads).uniform_(-6.9, -2.3).exp()  # 0.001 to 0.1
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus(dt_bias) = steps
        self.norm = GatedNorm(g.linear_value_dim, g.eps)
        self.out_proj = _linear(values, g.hidden, out_std)

    def forward(self, states: Tensor, questions: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Run states from zero and questions from where their state ended."""
        mixed = self.in_proj_qkv(states) * rows.is_state[..., None]
        state_out, final = self.mix(
            states, F.pad(mixed, (0, 0, self.g.conv_width - 1, 0)), rows.is_state, None
        )
        history = mixed[:, 1 - self.g.conv_width :].repeat_interleave(rows.fan, 0)
        mixed = torch.cat((history, self.in_proj_qkv(questions)), dim=1)
        question_out, _ = self.mix(questions, mixed, rows.is_question, final.repeat_interleave(rows.fan, 0))
        return state_out, question_out

    def mix(self, x: Tensor, mixed: Tensor, kept: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """One block of rows; padding rows leave the recurrent state as it is. `mixed` begins with the history."""
        g, length = self.g, x.shape[1]
        weight = self.conv1d.weight.to(mixed.dtype)
        mixed = F.silu(sum(mixed[:, i : i + length] * weight[:, 0, i] for i in range(g.conv_width)))  # type: ignore[arg-type]
        keys = g.linear_key_heads * g.linear_key_dim
        q, k, v = mixed.split((keys, keys, mixed.shape[-1] - 2 * keys), dim=-1)
        q, k = (_unit(each.unflatten(-1, (-1, g.linear_key_dim)).float()) for each in (q, k))
        v = v.unflatten(-1, (-1, g.linear_value_dim)).float()
        repeat = g.linear_value_heads // g.linear_key_heads
        q, k = q.repeat_interleave(repeat, dim=2), k.repeat_interleave(repeat, dim=2)
        beta = self.in_proj_b(x).float().sigmoid() * kept[..., None]
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias) * kept[..., None]
        out, final = gated_delta_rule(q * g.linear_key_dim**-0.5, k, v, decay, beta, initial)
        z = self.in_proj_z(x).unflatten(-1, (-1, g.linear_value_dim))
        return self.out_proj(self.norm(out, z).flatten(2)), final


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class GatedMLP(nn.Module):
    """down(silu(gate)·up)."""

    def __init__(self, g: Geometry, out_std: float) -> None:
        super().__init__()
        self.gate_proj = _linear(g.hidden, g.ffn, g.hidden**-0.5)
        self.up_proj = _linear(g.hidden, g.ffn, g.hidden**-0.5)
        self.down_proj = _linear(g.ffn, g.hidden, out_std)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to the last dimension."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Norm, mixer, norm, MLP; residuals stay in FP32."""

    def __init__(self, g: Geometry, index: int) -> None:
        super().__init__()
        depth = (2 * len(g.layer_types)) ** -0.5
        if g.layer_types[index] == "full_attention":
            self.self_attn = FullAttention(g, depth * (g.heads * g.head_dim) ** -0.5)
        else:
            self.linear_attn = LinearAttention(g, depth * (g.linear_value_heads * g.linear_value_dim) ** -0.5)
        self.mlp = GatedMLP(g, depth * g.ffn**-0.5)
        self.input_layernorm = RMSNorm(g.hidden, g.eps)
        self.post_attention_layernorm = RMSNorm(g.hidden, g.eps)

    def forward(self, states: Tensor, questions: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """One layer over states and questions."""
        mixer = self.self_attn if hasattr(self, "self_attn") else self.linear_attn
        mixed = mixer(self.input_layernorm(states), self.input_layernorm(questions), rows)
        states, questions = (x + m for x, m in zip((states, questions), mixed, strict=True))
        states, questions = (x + self.mlp(self.post_attention_layernorm(x)) for x in (states, questions))
        return states, questions


class Backbone(nn.Module):
    """Embedding, layers, norm: exactly the tensors of a package. The readout stands beside it."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.g = g
        self.embed_tokens = nn.Embedding(g.vocab_size, g.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(g, index) for index in range(len(g.layer_types)))
        self.norm = RMSNorm(g.hidden, g.eps)
        exponents = torch.arange(0, g.rotary_dim, 2, dtype=torch.float32) / g.rotary_dim
        self.register_buffer("frequencies", g.rope_theta**-exponents, persistent=False)

    def forward(self, batch: Batch, *, causal: bool = False, shown: Shown | None = None) -> Tensor:
        """The last row of every question's prompt [B, Q, hidden]."""
        rows = self._rows(batch, causal=causal)
        states = self.embed_tokens(batch.states)
        if shown is not None:
            states = states.masked_scatter(shown.pads[..., None], shown.features)
        questions = self.embed_tokens(batch.questions.flatten(0, 1))
        for layer in self.layers:
            states, questions = layer(states, questions, rows)
        last: Tensor = self.norm(_take(questions, batch.lengths.flatten() - 1))
        return last.unflatten(0, batch.counts.shape)

    def _rows(self, batch: Batch, *, causal: bool) -> Rows:
        device, fan = batch.states.device, batch.questions.shape[1]
        width, length = batch.states.shape[1], batch.questions.shape[2]
        state_columns, columns = torch.arange(width, device=device), torch.arange(length, device=device)
        is_state = state_columns >= width - batch.state_lengths[:, None]
        is_question = columns < batch.lengths.flatten()[:, None]
        state_mask = is_state[:, None, None]
        question_mask = torch.cat((is_state.repeat_interleave(fan, 0), is_question), dim=1)[:, None, None]
        if causal:
            state_mask = state_mask & (state_columns <= state_columns[:, None])
            seen = torch.cat((columns.new_ones(length, width).bool(), columns <= columns[:, None]), dim=1)
            question_mask = question_mask & seen
        itself = torch.eye(width, dtype=torch.bool, device=device)  # so that padding rows are no NaN
        state_mask = state_mask | itself
        positions = (state_columns - width + batch.state_lengths[:, None]).clamp(min=0)
        question_positions = batch.state_lengths.repeat_interleave(fan)[:, None] + columns
        rotary, question_rotary = self._rotary(positions), self._rotary(question_positions)
        return Rows(is_state, is_question, rotary, question_rotary, state_mask, question_mask, fan)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[..., None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _take(x: Tensor, index: Tensor) -> Tensor:
    """One row of each sequence: x [M, N, h], index [M] to [M, h]."""
    return x[torch.arange(len(x), device=x.device), index]


class Model(nn.Module):
    """A package's tensors: the backbone and the readout of CODES answer codes."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.backbone = Backbone(g)
        self.readout = nn.Parameter(torch.randn(CODES, g.hidden) * g.hidden**-0.5)

    def forward(self, batch: Batch, *, causal: bool = False, shown: Shown | None = None) -> Tensor:
        """Logits of the first OPTIONS codes [B, Q, OPTIONS] in FP32; -inf past a question's last option."""
        last = self.backbone(batch, causal=causal, shown=shown)
        with torch.autocast(last.device.type, enabled=False):
            logits = last @ self.readout[:OPTIONS].T
        beyond = torch.arange(OPTIONS, device=logits.device) >= batch.counts[..., None]
        return logits.masked_fill(beyond, float("-inf"))
