"""The hybrid decoder over one packed pass: full-attention and gated delta rule layers, all modes.

Every operation but the matrix products goes through `kernels.dispatch`; nothing in here waits for the
device, so the same code runs on a CPU, on a GPU and inside a CUDA graph.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from d3serve.kernels import dispatch
from d3serve.kernels.matrix import Float8Matrix, Matrix, Rows, sum_rows_alike
from d3serve.kernels.segments import AttentionShape
from d3serve.model.buckets import Bucket
from d3serve.model.config import Geometry
from d3serve.model.plan import PassRows
from d3serve.model.weights import FullAttention, Layer, LinearAttention, Weights


@dataclass(frozen=True)
class Pools:
    """What states leave behind: K and V of full-attention layers, both states of linear ones."""

    k: Tensor  # [full layers, P, HK, D], model type
    v: Tensor  # [full layers, P, HK, D], model type
    recurrent: Tensor  # [linear layers, slots, HV, K, V] FP32
    conv: Tensor  # [linear layers, slots, C, W - 1], model type, newest token in the last column

    @classmethod
    def allocate(
        cls, g: Geometry, *, rows: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> Self:
        """Allocate pools of `rows` K/V rows and `slots` recurrent slots."""
        kv = (g.full_layers, rows, g.kv_heads, g.head_dim)
        state = (g.linear_layers, slots, g.linear_value_heads, g.linear_key_dim, g.linear_value_dim)
        conv = (g.linear_layers, slots, g.conv_channels, g.conv_width - 1)
        return cls(
            k=torch.zeros(kv, dtype=dtype, device=device),
            v=torch.zeros(kv, dtype=dtype, device=device),
            recurrent=torch.zeros(state, dtype=torch.float32, device=device),
            conv=torch.zeros(conv, dtype=dtype, device=device),
        )


def row_bytes(g: Geometry, dtype: torch.dtype) -> int:
    """Memory of one K/V row over all full-attention layers."""
    return g.full_layers * 2 * g.kv_heads * g.head_dim * dtype.itemsize


def slot_bytes(g: Geometry, dtype: torch.dtype) -> int:
    """Memory of one recurrent and conv slot over all linear layers."""
    state = g.linear_value_heads * g.linear_key_dim * g.linear_value_dim * torch.float32.itemsize
    return g.linear_layers * (state + g.conv_channels * (g.conv_width - 1) * dtype.itemsize)


@dataclass(frozen=True)
class PassInputs:
    """A planned pass on the device; the plans are what the kernels made of its segments."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    readout_rows: Tensor  # [N] int64, counted from `state_rows`
    state_rows: int
    attention: Any
    question_attention: Any  # of the rows from `state_rows` on, for the last layer
    recurrence: Any

    @classmethod
    def build(cls, rows: PassRows, cut: Any, shape: AttentionShape, *, bucket: Bucket | None = None) -> Self:
        """Copy a planned pass to the device, padded to `bucket` if given, and let the kernels plan theirs.

        `cut` is what `dispatch.cut_attention` made of its segments.
        """
        if bucket is not None:
            rows = bucket.pad(rows)
        sizes = bucket.attention if bucket else None
        attention = question_attention = dispatch.plan_attention(cut, shape, sizes=sizes)
        if rows.state_rows:
            questions = dispatch.cut_attention(rows.question_segments, shape)
            question_attention = dispatch.plan_attention(questions, shape, sizes=sizes)
        arrays = (rows.tokens, rows.positions, rows.slot_mapping, rows.readout_rows - rows.state_rows)
        tokens, positions, slot_mapping, readout_rows = (
            torch.from_numpy(each).to(shape.device) for each in arrays
        )
        return cls(
            tokens=tokens,
            positions=positions,
            slot_mapping=slot_mapping,
            readout_rows=readout_rows,
            state_rows=rows.state_rows,
            attention=attention,
            question_attention=question_attention,
            recurrence=dispatch.plan_recurrence(
                rows.segments, device=shape.device, sizes=bucket.recurrence if bucket else None
            ),
        )

    def copy_(self, other: Self) -> None:
        """Take over the contents of a pass of the same bucket, in place: a captured graph reads `self`."""
        for mine, theirs in (
            (self.tokens, other.tokens),
            (self.positions, other.positions),
            (self.slot_mapping, other.slot_mapping),
            (self.readout_rows, other.readout_rows),
            (self.attention.table, other.attention.table),
            (self.recurrence.table, other.recurrence.table),
        ):
            mine.copy_(theirs)


class Backbone:
    """Runs packed passes against the pools."""

    def __init__(self, geometry: Geometry, weights: Weights, pools: Pools, *, mlp_rows: int) -> None:
        """Take ownership of `weights` and `pools`; `mlp_rows` bounds the rows of one MLP step."""
        if pools.k.is_cuda:
            sum_rows_alike()
        self.geometry = geometry
        self.weights = weights
        self.pools = pools
        self._mlp_rows = mlp_rows
        exponents = torch.arange(0, geometry.rotary_dim, 2, dtype=torch.float32) / geometry.rotary_dim
        self._frequencies = (geometry.rope_theta**-exponents).to(pools.k.device)

    def attention_shape(self, *, causal: bool) -> AttentionShape:
        """What `PassInputs.build` must know of this backbone."""
        g, k = self.geometry, self.pools.k
        return AttentionShape(causal, g.heads, g.kv_heads, g.head_dim, k.dtype, k.device)

    def forward(self, inputs: PassInputs) -> Tensor:
        """Run every layer; return the normed hidden state of each readout row, [N, hidden] in model type.

        `x` and `residual` are rebound at every step, so that what a step no longer needs is free before the
        next: on a long state one set of activations is gigabytes.
        """
        x, residual = F.embedding(inputs.tokens, self.weights.embedding), None
        rotary = self._rotary(inputs.positions)
        counts = {FullAttention: 0, LinearAttention: 0}
        for layer in self.weights.layers[:-1]:
            x, residual = self._norm(x, residual, layer.input_norm, layer.first)
            x = self._mix(layer.mixer, x, inputs, rotary, counts[type(layer.mixer)])
            x, residual = self._norm(x, residual, layer.post_norm, layer.gate_up)
            x = self._mlp(layer, x)
            counts[type(layer.mixer)] += 1
        layer = self.weights.layers[-1]
        x, residual = self._norm(x, residual, layer.input_norm, layer.first)
        x = self._mix_readout(layer.mixer, x, inputs, rotary, counts[type(layer.mixer)])
        residual = residual[inputs.state_rows :].index_select(0, inputs.readout_rows)
        x, residual = self._norm(x, residual, layer.post_norm, layer.gate_up)
        x = self._mlp(layer, x)
        hidden: Tensor = self._norm(x, residual, self.weights.norm, self.weights.readout)[0]
        return hidden

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, reader: Matrix) -> tuple[Any, Tensor]:
        """Add to the residual stream and normalise, for `reader`: what an FP8 weight reads is quantized at once."""
        float8 = isinstance(reader, Float8Matrix)
        return dispatch.add_rms_norm(x, residual, weight, self.geometry.eps, float8=float8)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [T, R] FP32. Text only: the three axes of the interleaved rotary embedding agree."""
        angles = positions.float()[:, None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def _mix(
        self,
        mixer: FullAttention | LinearAttention,
        x: Rows,
        inputs: PassInputs,
        rotary: tuple[Tensor, Tensor],
        index: int,
    ) -> Tensor:
        """Mix all rows of one layer, [T, hidden]; `index` counts the layers of its kind."""
        if isinstance(mixer, FullAttention):
            qkv = dispatch.linear(x, mixer.qkv)
            q = self._store(mixer, qkv, rotary, inputs.slot_mapping, index)
            mixed = dispatch.sigmoid_gate(self._attend(q, inputs.attention, index), qkv)
        else:
            mixed = self._gate_values(mixer, *self._delta_rule(mixer, x, inputs.recurrence, index))
        return dispatch.linear(mixed, mixer.out)

    def _mix_readout(
        self,
        mixer: FullAttention | LinearAttention,
        x: Rows,
        inputs: PassInputs,
        rotary: tuple[Tensor, Tensor],
        index: int,
    ) -> Tensor:
        """Mix the last layer: nothing reads more of a state row than K, V and linear states.

        Its output projection runs on readout rows alone: [N, hidden].
        """
        states, readout = inputs.state_rows, inputs.readout_rows
        if isinstance(mixer, FullAttention):
            mixed = self._question_attention(mixer, x, inputs, rotary, index).index_select(0, readout)
        else:
            values, z = self._delta_rule(mixer, x, inputs.recurrence, index)
            values, z = values[states:].index_select(0, readout), z[states:].index_select(0, readout)
            mixed = self._gate_values(mixer, values, z)
        return dispatch.linear(mixed, mixer.out)

    def _question_attention(
        self,
        mixer: FullAttention,
        x: Rows,
        inputs: PassInputs,
        rotary: tuple[Tensor, Tensor],
        index: int,
    ) -> Tensor:
        """Attention of the question rows alone, after state rows have stored their K and V: [Tq, H·D]."""
        g, states, (cos, sin) = self.geometry, inputs.state_rows, rotary
        if states:
            kv = dispatch.linear(x[:states], mixer.qkv[2 * g.heads * g.head_dim :])
            self._store(mixer, kv, (cos[:states], sin[:states]), inputs.slot_mapping[:states], index, heads=0)
        qkv = dispatch.linear(x[states:], mixer.qkv)
        q = self._store(mixer, qkv, (cos[states:], sin[states:]), inputs.slot_mapping[states:], index)
        return dispatch.sigmoid_gate(self._attend(q, inputs.question_attention, index), qkv)

    def _store(
        self,
        mixer: FullAttention,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        index: int,
        heads: int | None = None,
    ) -> Tensor:
        g = self.geometry
        return dispatch.qk_norm_rope_store(
            qkv,
            mixer.q_norm,
            mixer.k_norm,
            *rotary,
            self.pools.k[index],
            self.pools.v[index],
            slot_mapping,
            heads=g.heads if heads is None else heads,
            kv_heads=g.kv_heads,
            head_dim=g.head_dim,
            eps=g.eps,
        )

    def _attend(self, q: Tensor, plan: Any, index: int) -> Tensor:
        return dispatch.prefix_bidir_attention(
            q, self.pools.k[index], self.pools.v[index], plan, softmax_scale=self.geometry.head_dim**-0.5
        )

    def _delta_rule(self, mixer: LinearAttention, x: Rows, plan: Any, index: int) -> tuple[Tensor, Tensor]:
        """Values of the gated delta rule [T, HV, V] and their gate z [T, HV·V]."""
        g = self.geometry
        HV = g.linear_value_heads
        widths = [g.conv_channels, HV * g.linear_value_dim, HV, HV]
        mixed, z, b, a = torch.split(dispatch.linear(x, mixer.inputs), widths, dim=-1)
        q, k, v, decay, beta = dispatch.gdn_prepare(
            mixed,
            b,
            a,
            mixer.conv,
            self.pools.conv[index],
            mixer.A_log,
            mixer.dt_bias,
            plan,
            key_heads=g.linear_key_heads,
            value_heads=HV,
            key_dim=g.linear_key_dim,
            value_dim=g.linear_value_dim,
        )
        states, scale = self.pools.recurrent[index], g.linear_key_dim**-0.5
        return dispatch.gated_delta_rule(q, k, v, decay, beta, states, plan, scale=scale), z

    def _gate_values(self, mixer: LinearAttention, values: Tensor, z: Tensor) -> Tensor:
        return dispatch.gated_rms_norm(values, z, mixer.norm, self.geometry.eps)

    def _mlp(self, layer: Layer, x: Rows) -> Tensor:
        """Apply the gated MLP in steps of rows: its inner width is what bounds memory on long states."""
        if len(x) <= self._mlp_rows:
            return dispatch.linear(self._inner(layer, x), layer.down)
        out = torch.empty(len(x), self.geometry.hidden, dtype=self.pools.k.dtype, device=self.pools.k.device)
        for start in range(0, len(x), self._mlp_rows):
            rows = slice(start, start + self._mlp_rows)
            dispatch.linear(self._inner(layer, x[rows]), layer.down, out=out[rows])
        return out

    def _inner(self, layer: Layer, x: Rows) -> Rows:
        gate_up = dispatch.linear(x, layer.gate_up)
        return dispatch.silu_mul(gate_up, float8=isinstance(layer.down, Float8Matrix))
