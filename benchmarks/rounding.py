"""A pass in FP32 in which chosen tensors are rounded to BF16: what each rounding of a BF16 pass adds by itself.

`RoundedOperations` is one more set of `d3serve.kernels.operations.Operations`: the reference's, in FP32, with a name
for every tensor that a BF16 pass stores. With no name chosen it is the definition that answers are measured against.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, cast, overload

import torch
from torch import Tensor

from d3serve.kernels import reference
from d3serve.kernels.matrix import Float8Matrix, Rows, StackedMatrix
from d3serve.kernels.operations import Operations
from d3serve.kernels.segments import AttentionShape, Segment
from d3serve.model.weights import Layer, Weights

STREAM = "residual stream"  # kept in FP32 by a BF16 pass of ours, in BF16 by others
KERNELS = ("delta rule, inside its kernels", "attention, inside its kernel")
POINTS = (
    "normed rows, to a mixer",
    "normed rows, to an MLP",
    "normed rows, to the readout",
    "qkv product of a full layer",
    "rotated q and k",
    "attention, inside its kernel",
    "attention's output",
    "gated attention",
    "qkv product of a linear layer",
    "z product",
    "b and a products",
    "convolved q, k and v",
    "delta rule, inside its kernels",
    "delta rule's output",
    "gated norm's output",
    "out product",
    "gate_up product",
    "silu(gate) * up",
    "down product",
)


class Both(NamedTuple):
    """What the reference and, if a kernel takes part, the kernels made of the same segments."""

    exact: Any
    fast: Any


class RoundedOperations:
    """The reference operations on FP32 tensors; those that `points` names are rounded to BF16 where they arise.

    A kernel's inside is rounded by running the kernel itself on BF16 operands.
    """

    least_rows = reference.least_rows
    embed = staticmethod(reference.embed)

    def __init__(self, points: Set[str], layers: int) -> None:
        """Round at `points` in passes of `layers` layers.

        Raises:
            ValueError: a point has no such name.
        """
        if unknown := points - {*POINTS, STREAM}:
            raise ValueError(f"no such points: {sorted(unknown)}")
        self._points = points
        self._layers = layers
        self._norms = 0  # calls of add_rms_norm in this pass: they tell what its rows come from and go to
        self._kernels: Operations | None = None
        if points & set(KERNELS):
            from d3serve.kernels import fast  # imports triton

            self._kernels = fast

    def _at(self, point: str, x: Tensor) -> Tensor:
        return x.bfloat16().float() if point in self._points else x

    def cut_attention(self, segments: Sequence[Segment], shape: AttentionShape) -> Both:
        """Cut a pass for both."""
        shape = shape._replace(dtype=torch.bfloat16)
        return Both(
            reference.cut_attention(segments, shape),
            self._kernels and self._kernels.cut_attention(segments, shape),
        )

    def plan_attention(self, cut: Both, shape: AttentionShape, *, sizes: Any = None) -> Both:  # noqa: ARG002 - as the kernels'
        """Plan a cut pass for both."""
        shape = shape._replace(dtype=torch.bfloat16)
        return Both(cut.exact, self._kernels and self._kernels.plan_attention(cut.fast, shape))

    def plan_recurrence(
        self,
        segments: Sequence[Segment],
        *,
        device: torch.device,
        sizes: Any = None,  # noqa: ARG002 - as the kernels'
    ) -> Both:
        """Plan a pass for both; this begins it."""
        self._norms = 0
        return Both(
            reference.plan_recurrence(segments, device=device),
            self._kernels and self._kernels.plan_recurrence(segments, device=device),
        )

    def attention_steps(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, plan: Both, *, softmax_scale: float
    ) -> Iterator[int]:
        """Attend into `out`."""
        if KERNELS[1] in self._points and self._kernels is not None:
            narrow = [each.bfloat16() for each in (q, k_pool, v_pool, out)]
            yield from self._kernels.attention_steps(*narrow, plan.fast, softmax_scale=softmax_scale)
            out.copy_(narrow[3])
        else:
            yield from reference.attention_steps(
                q, k_pool, v_pool, out, plan.exact, softmax_scale=softmax_scale
            )
            out.copy_(self._at("attention's output", out))

    def gdn_prepare(
        self, mixed: Tensor, b: Tensor, a: Tensor, *weights: Any, **shape: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Convolve and normalise; `weights` ends with the plan."""
        *others, plan = weights
        mixed = self._at("qkv product of a linear layer", mixed)
        b, a = (self._at("b and a products", each) for each in (b, a))
        q, k, v, g, beta = reference.gdn_prepare(mixed, b, a, *others, plan.exact, **shape)
        q, k, v = (self._at("convolved q, k and v", each) for each in (q, k, v))
        return q, k, v, g, beta

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states: Tensor,
        plan: Both,
        *,
        scale: float,
    ) -> Tensor:
        """Run the rule."""
        if KERNELS[0] in self._points and self._kernels is not None:
            narrow = [each.bfloat16().contiguous() for each in (q, k, v)]
            return self._kernels.gated_delta_rule(*narrow, g, beta, states, plan.fast, scale=scale).float()
        values = reference.gated_delta_rule(q, k, v, g, beta, states, plan.exact, scale=scale)
        return self._at("delta rule's output", values)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        *,
        float8: bool = False,
        both: bool = False,
    ) -> tuple[Rows, Tensor]:
        """Add and normalise: before each mixer, before each MLP, before the readout."""
        call, self._norms = self._norms, self._norms + 1
        x = x.float()
        if residual is not None:
            x = self._at("out product" if call % 2 else "down product", x)
            if STREAM in self._points:
                x, residual = self._at(STREAM, residual + x), None
        normed, total = reference.add_rms_norm(x, residual, weight, eps, float8=float8, both=both)
        reader = "an MLP" if call % 2 else "the readout" if call == 2 * self._layers else "a mixer"
        return self._at(f"normed rows, to {reader}", cast("Tensor", normed)), total

    def qk_norm_rope_store(
        self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
        k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor, **shape: Any,
    ) -> Tensor:  # fmt: skip
        """Normalise, rotate and store."""
        qkv = self._at("qkv product of a full layer", qkv)
        q = reference.qk_norm_rope_store(
            qkv, q_weight, k_weight, cos, sin, k_pool, v_pool, slot_mapping, **shape
        )
        k_pool[slot_mapping] = self._at("rotated q and k", k_pool[slot_mapping])
        return self._at("rotated q and k", q)

    def sigmoid_gate(self, attn: Tensor, qkv: Tensor) -> Tensor:
        """Gate attention's output."""
        return self._at(
            "gated attention", reference.sigmoid_gate(attn, self._at("qkv product of a full layer", qkv))
        )

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise and gate the delta rule's output."""
        z = self._at("z product", z)
        return self._at("gated norm's output", reference.gated_rms_norm(x, z, weight, eps))

    def silu_mul(self, gate_up: Tensor, *, float8: bool = False) -> Rows:
        """Activate."""
        out = reference.silu_mul(self._at("gate_up product", gate_up), float8=float8)
        return self._at("silu(gate) * up", cast("Tensor", out))

    def narrow_linear(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Never asked for: the matrices of such a pass are whole."""
        raise NotImplementedError

    def float8_linear(self, x: Rows, weight: Float8Matrix, out: Tensor | None = None) -> Tensor:
        """Never asked for: the matrices of such a pass are FP32."""
        raise NotImplementedError


class WideLayers(Sequence[Layer]):
    """Layers in FP32, each widened when it is read: all of a 27B would not fit beside their BF16 or FP8 selves."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        """Widen `layers`."""
        self._layers = layers

    def __len__(self) -> int:
        """Count the layers."""
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> "WideLayers": ...
    def __getitem__(self, index: int | slice) -> "Layer | WideLayers":
        """Widen one layer, or put some off."""
        found = self._layers[index]
        return _widened(found) if isinstance(found, Layer) else WideLayers(found)


def widened(weights: Weights) -> Weights:
    """The same weights, whose layers are FP32 when they are read."""
    return replace(weights, layers=cast("Any", WideLayers(weights.layers)))


def _widened(part: Any) -> Any:
    """A layer, a mixer or a matrix in FP32."""
    if isinstance(part, Float8Matrix):
        return part.values.float() * part.scale
    if isinstance(part, StackedMatrix):
        return torch.cat([_widened(each) for each in part.parts])
    if is_dataclass(part):
        held = cast("Any", part)
        return replace(held, **{each.name: _widened(getattr(part, each.name)) for each in fields(held)})
    return part.float()
