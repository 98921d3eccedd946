"""The one place that chooses an implementation: the fast kernels for CUDA tensors, else the reference.

A pass builds one plan for its full-attention layers and one for its linear layers, and every layer uses
them. The Triton modules are imported on first use, so that a machine without a
GPU never needs triton. Shapes and formulas are documented in `d3serve.kernels.reference`.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d3serve.kernels import reference
from d3serve.kernels.attention_plan import Sizes as AttentionSizes
from d3serve.kernels.matrix import Float8Matrix, Matrix, Rows
from d3serve.kernels.recurrence_plan import RecurrenceSizes
from d3serve.kernels.segments import AttentionShape, Segment


def _fast(name: str, device: torch.device) -> Any:
    """Import the module that implements an operation on `device`."""
    return import_module(f"d3serve.kernels.{name}") if device.type == "cuda" else reference


def cut_attention(segments: Sequence[Segment], shape: AttentionShape) -> Any:
    """Decide how the full-attention layers of a pass are cut.

    `partials` of the result is what the sizes of a padded plan must have room for; it is opaque otherwise.
    """
    return _fast("prefix_bidir", shape.device).cut_attention(segments, shape)


def plan_attention(cut: Any, shape: AttentionShape, *, sizes: AttentionSizes | None = None) -> Any:
    """Prepare the full-attention layers of a cut pass; opaque outside the kernels.

    `sizes` pad a plan for the GPU, so that what is launched does not depend on its contents.
    """
    return _fast("prefix_bidir", shape.device).plan_attention(cut, shape, sizes=sizes)


def plan_recurrence(
    segments: Sequence[Segment], *, device: torch.device, sizes: RecurrenceSizes | None = None
) -> Any:
    """Prepare the linear layers of a pass (states stand before questions); opaque outside the kernels.

    `sizes` pads a plan for the GPU.
    """
    return _fast("recurrence_plan", device).plan_recurrence(segments, device=device, sizes=sizes)


def prefix_bidir_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: Any, *, softmax_scale: float
) -> Tensor:
    """Attend from each segment's rows to its prefix and its own block."""
    module = _fast("prefix_bidir", q.device)
    attended: Tensor = module.prefix_bidir_attention(q, k_pool, v_pool, plan, softmax_scale=softmax_scale)
    return attended


def gdn_prepare(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    conv_states: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    plan: Any,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Convolve and normalise the inputs of the gated delta rule; carry the conv state on."""
    prepared: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _fast("convolution", mixed.device).gdn_prepare(
        mixed,
        b,
        a,
        conv_weight,
        conv_states,
        A_log,
        dt_bias,
        plan,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    return prepared


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_states: Tensor,
    plan: Any,
    *,
    scale: float,
) -> Tensor:
    """Run the gated delta rule over each segment from its initial slot."""
    module = _fast("gated_delta", q.device)
    out: Tensor = module.gated_delta_rule(q, k, v, g, beta, recurrent_states, plan, scale=scale)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, float8: bool
) -> tuple[Rows, Tensor]:
    """Add to the residual stream and normalise; quantize what is normed if it meets an FP8 weight next."""
    module = _fast("fused", x.device)
    result: tuple[Rows, Tensor] = module.add_rms_norm(x, residual, weight, eps, float8=float8)
    return result


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
    """Normalise and rotate queries and keys; write K and V into the pools."""
    q: Tensor = _fast("fused", qkv.device).qk_norm_rope_store(
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        k_pool,
        v_pool,
        slot_mapping,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=eps,
    )
    return q


def sigmoid_gate(attn: Tensor, qkv: Tensor) -> Tensor:
    """Multiply attention's output by the sigmoid of the gate in `qkv`."""
    gated: Tensor = _fast("fused", attn.device).sigmoid_gate(attn, qkv)
    return gated


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each value head and multiply by silu(z)."""
    normed: Tensor = _fast("fused", x.device).gated_rms_norm(x, z, weight, eps)
    return normed


def silu_mul(gate_up: Tensor, *, float8: bool) -> Rows:
    """silu(gate)·up of one fused projection, quantized if it meets an FP8 weight next."""
    out: Rows = _fast("fused", gate_up.device).silu_mul(gate_up, float8=float8)
    return out


def linear(x: Rows, weight: Matrix, out: Tensor | None = None) -> Tensor:
    """Multiply x [T, columns] by the transpose of a weight [rows, columns], plain or FP8: [T, rows] or `out`.

    Raises:
        ValueError: quantized rows meet a plain weight.
    """
    if isinstance(weight, Float8Matrix):
        device = weight.values.device
        product: Tensor = _fast("float8", device).float8_linear(x, weight, out)
        return product
    if not isinstance(x, Tensor):
        raise ValueError("quantized rows meet a plain weight")
    return F.linear(x, weight) if out is None else torch.mm(x, weight.T, out=out)
