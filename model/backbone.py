"""The hybrid decoder over one packed pass: full-attention and gated delta rule layers, all modes.

Every operation but the plain matrix products is one of `kernels.operations`; nothing in here waits for the
device, so the same code runs on a CPU, on a GPU and inside a CUDA graph.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from d3serve.kernels.matrix import Float8Matrix, Matrix, Rows, StackedMatrix, sum_rows_alike
from d3serve.kernels.operations import (
    AttentionCut,
    LinearRule,
    Operations,
    PlannedAttention,
    linear,
    operations,
)
from d3serve.kernels.segments import AttentionShape, LongAttention
from d3serve.kernels.tables import upload
from d3serve.model.buckets import Bucket
from d3serve.model.config import Geometry
from d3serve.model.mrope import axes
from d3serve.model.plan import MediumRows, PassRows
from d3serve.model.vision import VisionTower
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

    def parts(self, start: int, length: int, slot: int) -> Iterator[Tensor]:
        """Yield all that a state owns here, each part contiguous."""
        for pool in (self.k, self.v):
            yield from (layer[start : start + length] for layer in pool)
        for pool in (self.recurrent, self.conv):
            yield from (layer[slot] for layer in pool)


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

    table: Tensor  # int64, holds the four below
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, or [3, T] where media are read
    slot_mapping: Tensor  # [T] int64
    readout_rows: Tensor  # [N or more] int64, counted from `state_rows`; what is more than N nobody reads
    state_rows: int
    attention: PlannedAttention
    question_attention: PlannedAttention  # of the rows from `state_rows` on, for the last layer
    recurrence: object
    media: tuple[MediumRows, ...] = ()

    @classmethod
    def build(
        cls,
        ops: Operations,
        rows: PassRows,
        cut: AttentionCut,
        shape: AttentionShape,
        *,
        bucket: Bucket | None = None,
    ) -> Self:
        """Copy a planned pass to the device, padded to `bucket` if given, and let the kernels plan theirs.

        `cut` is what `ops.cut_attention` made of its segments.
        """
        if bucket is not None:
            rows = bucket.pad(rows)
        sizes = bucket.attention if bucket else None
        attention = question_attention = ops.plan_attention(cut, shape, sizes=sizes)
        if rows.state_rows:
            questions = ops.cut_attention(rows.question_segments, shape)
            question_attention = ops.plan_attention(questions, shape, sizes=sizes)
        readout = np.resize(rows.readout_rows, max(len(rows.readout_rows), ops.least_rows))
        arrays = (rows.tokens, rows.positions, rows.slot_mapping, readout - rows.state_rows)
        table, (tokens, positions, slot_mapping, readout_rows) = upload(arrays, torch.int64, shape.device)
        return cls(
            table=table,
            tokens=tokens,
            positions=positions,
            slot_mapping=slot_mapping,
            readout_rows=readout_rows,
            state_rows=rows.state_rows,
            attention=attention,
            question_attention=question_attention,
            recurrence=ops.plan_recurrence(
                rows.segments, device=shape.device, sizes=bucket.recurrence if bucket else None
            ),
            media=rows.media,
        )

    def copy_(self, other: Self) -> None:
        """Take over the contents of a pass of the same bucket, in place: a captured graph reads `self`."""
        for mine, theirs in (
            (self.table, other.table),
            (_table(self.attention), _table(other.attention)),
            (_table(self.recurrence), _table(other.recurrence)),
        ):
            mine.copy_(theirs)


def _table(plan: Any) -> Tensor:
    """The integers of a plan, which its kernels read; only the set that a GPU has can capture graphs, and has them."""
    table: Tensor = plan.table
    return table


PassSteps = Generator[
    int, None, Tensor
]  # yields the floating-point operations of each step, once it is launched


class Backbone:
    """Runs packed passes against the pools."""

    def __init__(
        self,
        geometry: Geometry,
        weights: Weights,
        pools: Pools,
        *,
        mlp_rows: int,
        tower: VisionTower | None = None,
        linear_rule: LinearRule = "ours",
        long_attention: LongAttention = "ours",
    ) -> None:
        """Take ownership of `weights` and `pools`; `mlp_rows` bounds the rows of one MLP step.

        With a `tower`, passes may read media. `linear_rule` is whose gated delta rule runs on a GPU, and
        `long_attention` whose attention reads long states there.
        """
        if pools.k.is_cuda:
            sum_rows_alike()
        self.ops = operations(pools.k.device, linear_rule)
        self.geometry = geometry
        self.weights = weights
        self.pools = pools
        self.tower = tower
        self.long_attention = long_attention
        self._mlp_rows = mlp_rows
        exponents = torch.arange(0, geometry.rotary_dim, 2, dtype=torch.float32) / geometry.rotary_dim
        self._frequencies = (geometry.rope_theta**-exponents).to(pools.k.device)
        sections = tower.geometry.sections if tower else (len(exponents), 0, 0)
        self._axes = torch.from_numpy(axes(sections, len(exponents))).to(pools.k.device)

    def attention_shape(self, *, causal: bool) -> AttentionShape:
        """What `PassInputs.build` must know of this backbone."""
        g, k = self.geometry, self.pools.k
        return AttentionShape(causal, g.heads, g.kv_heads, g.head_dim, k.dtype, k.device, self.long_attention)

    def forward(self, inputs: PassInputs) -> Tensor:
        """Run every layer; return the normed hidden state of each readout row, [N or more, hidden] in model type."""
        steps = self.steps(inputs)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                hidden: Tensor = end.value
                return hidden

    def work(self, inputs: PassInputs) -> int:
        """Floating-point operations of the products and attentions of a pass: the sum of what `steps` yields."""
        *layers, last = self.weights.layers
        rows, pairs = len(inputs.tokens), (inputs.attention.pairs, inputs.question_attention.pairs)
        attention, question_attention = (each * self._pair_flops for each in pairs)
        flops = _flops(rows, last.first) + sum(self._tower.work(each.medium) for each in inputs.media)
        flops += question_attention if isinstance(last.mixer, FullAttention) else 0
        for layer in layers:
            flops += _flops(rows, layer.first, layer.mixer.out, layer.gate_up, layer.down)
            flops += attention if isinstance(layer.mixer, FullAttention) else 0
        return flops

    @property
    def _pair_flops(self) -> int:
        return 4 * self.geometry.heads * self.geometry.head_dim

    def steps(self, inputs: PassInputs) -> PassSteps:
        """Run a pass as `forward` does, yielding after each step; a step of a long pass is some 40 ms of an H200.

        Other passes may run between two steps, on other pool rows and slots: no bit changes.

        `x` and `residual` are rebound at every operation, so that what one no longer needs is free before the
        next: on a long state one set of activations is gigabytes.
        """
        x, residual = self.ops.embed(inputs.tokens, self.weights.embedding), None
        yield from self._show(inputs.media, x)
        rotary = self._rotary(inputs.positions)
        counts = {FullAttention: 0, LinearAttention: 0}
        for layer in self.weights.layers[:-1]:
            x, residual = self._norm(x, residual, layer.input_norm, layer.first)
            x = linear(x, layer.first)
            yield _flops(len(x), layer.first)
            x = yield from self._mix(layer, x, inputs, rotary, counts[type(layer.mixer)])
            x, residual = self._norm(x, residual, layer.post_norm, layer.gate_up)
            x = yield from self._mlp(layer, x)
            counts[type(layer.mixer)] += 1
        layer = self.weights.layers[-1]
        x, residual = self._norm(x, residual, layer.input_norm, layer.first)
        x = yield from self._mix_readout(layer, x, inputs, rotary, counts[type(layer.mixer)])
        residual = residual[inputs.state_rows :].index_select(0, inputs.readout_rows)
        x, residual = self._norm(x, residual, layer.post_norm, layer.gate_up)
        x = linear(self._inner(layer, x), layer.down)
        hidden: Tensor = self._norm(x, residual, self.weights.norm, self.weights.readout)[0]
        return hidden

    @property
    def _tower(self) -> VisionTower:
        if self.tower is None:
            raise ValueError("a pass with media needs a vision tower")
        return self.tower

    def _show(self, media: Sequence[MediumRows], x: Tensor) -> Generator[int, None, None]:
        """Put each medium's features where its pads are, in place: one run of the tower for all places."""
        for each in media:
            features = yield from self._tower.steps(each.medium)
            for rows in torch.from_numpy(each.rows).to(x.device):
                x.index_copy_(0, rows, features)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, reader: Matrix) -> tuple[Any, Tensor]:
        """Add to the residual stream and normalise, for `reader`: what an FP8 weight reads is quantized at once."""
        parts = reader.parts if isinstance(reader, StackedMatrix) else (reader,)
        float8 = [isinstance(part, Float8Matrix) for part in parts]
        eps, both = self.geometry.eps, any(float8) and not all(float8)
        return self.ops.add_rms_norm(x, residual, weight, eps, float8=any(float8), both=both)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [T, R] FP32. Without media the three axes of the interleaved rotary embedding agree."""
        turned = positions[:, None] if positions.ndim == 1 else positions[self._axes].T
        angles = turned.float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def _mix(
        self, layer: Layer, projected: Tensor, inputs: PassInputs, rotary: tuple[Tensor, Tensor], index: int
    ) -> PassSteps:
        """Mix all rows of one layer, [T, hidden]; `index` counts the layers of its kind."""
        mixer = layer.mixer
        if isinstance(mixer, FullAttention):
            q = self._store(mixer, projected, rotary, inputs.slot_mapping, index)
            attended = yield from self._attend(q, inputs.attention, index)
            mixed = self.ops.sigmoid_gate(attended, projected)
        else:
            mixed = self._gate_values(mixer, *self._delta_rule(mixer, projected, inputs.recurrence, index))
        out = linear(mixed, mixer.out)
        yield _flops(len(out), mixer.out)
        return out

    def _mix_readout(
        self, layer: Layer, x: Rows, inputs: PassInputs, rotary: tuple[Tensor, Tensor], index: int
    ) -> PassSteps:
        """Mix the last layer: nothing reads more of a state row than K, V and linear states.

        Its output projection runs on readout rows alone: [N, hidden].
        """
        mixer, states, readout = layer.mixer, inputs.state_rows, inputs.readout_rows
        yield _flops(len(x), layer.first)
        if isinstance(mixer, FullAttention):
            attended = yield from self._question_attention(mixer, x, inputs, rotary, index)
            mixed = attended.index_select(0, readout)
        else:
            values, z = self._delta_rule(mixer, linear(x, layer.first), inputs.recurrence, index)
            values, z = values[states:].index_select(0, readout), z[states:].index_select(0, readout)
            mixed = self._gate_values(mixer, values, z)
        return linear(mixed, mixer.out)

    def _question_attention(
        self,
        mixer: FullAttention,
        x: Rows,
        inputs: PassInputs,
        rotary: tuple[Tensor, Tensor],
        index: int,
    ) -> PassSteps:
        """Attention of the question rows alone, after state rows have stored their K and V: [Tq, H·D]."""
        g, states, (cos, sin) = self.geometry, inputs.state_rows, rotary
        if states:
            kv = linear(x[:states], mixer.qkv[2 * g.heads * g.head_dim :])
            self._store(mixer, kv, (cos[:states], sin[:states]), inputs.slot_mapping[:states], index, heads=0)
        qkv = linear(x[states:], mixer.qkv)
        q = self._store(mixer, qkv, (cos[states:], sin[states:]), inputs.slot_mapping[states:], index)
        attended = yield from self._attend(q, inputs.question_attention, index)
        return self.ops.sigmoid_gate(attended, qkv)

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
        return self.ops.qk_norm_rope_store(
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

    def _attend(self, q: Tensor, plan: PlannedAttention, index: int) -> PassSteps:
        k, v, out = self.pools.k[index], self.pools.v[index], torch.empty_like(q)
        for pairs in self.ops.attention_steps(q, k, v, out, plan, softmax_scale=self.geometry.head_dim**-0.5):
            yield pairs * self._pair_flops
        return out

    def _delta_rule(
        self, mixer: LinearAttention, projected: Tensor, plan: object, index: int
    ) -> tuple[Tensor, Tensor]:
        """Values of the gated delta rule [T, HV, V] and their gate z [T, HV·V]."""
        g = self.geometry
        HV = g.linear_value_heads
        widths = [g.conv_channels, HV * g.linear_value_dim, HV, HV]
        mixed, z, b, a = torch.split(projected, widths, dim=-1)
        q, k, v, decay, beta = self.ops.gdn_prepare(
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
        return self.ops.gated_delta_rule(q, k, v, decay, beta, states, plan, scale=scale), z

    def _gate_values(self, mixer: LinearAttention, values: Tensor, z: Tensor) -> Tensor:
        return self.ops.gated_rms_norm(values, z, mixer.norm, self.geometry.eps)

    def _mlp(self, layer: Layer, x: Rows) -> PassSteps:
        """Apply the gated MLP in steps of rows: its inner width is what bounds memory on long states."""
        out = torch.empty(len(x), self.geometry.hidden, dtype=self.pools.k.dtype, device=self.pools.k.device)
        for start in range(0, len(x), self._mlp_rows):
            rows = slice(start, start + self._mlp_rows)
            linear(self._inner(layer, x[rows]), layer.down, out=out[rows])
            yield _flops(len(out[rows]), layer.gate_up, layer.down)
        return out

    def _inner(self, layer: Layer, x: Rows) -> Rows:
        gate_up = linear(x, layer.gate_up)
        return self.ops.silu_mul(gate_up, float8=isinstance(layer.down, Float8Matrix))


def _flops(rows: int, *matrices: Matrix) -> int:
    """Floating-point operations of products of `rows` with each matrix."""
    return sum(2 * rows * matrix.shape[0] * matrix.shape[1] for matrix in matrices)
