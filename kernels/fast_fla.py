"""The fast kernels as one set of `Operations`, with the gated delta rule of flash-linear-attention instead of ours."""

from d3serve.kernels.fast import (
    add_rms_norm,
    attention_steps,
    cut_attention,
    embed,
    float8_linear,
    gated_rms_norm,
    gdn_prepare,
    int4_linear,
    least_rows,
    narrow_linear,
    plan_attention,
    qk_norm_rope_store,
    sigmoid_gate,
    silu_mul,
)
from d3serve.kernels.fla_rule import gated_delta_rule, plan_recurrence

__all__ = [
    "add_rms_norm",
    "attention_steps",
    "captures",
    "cut_attention",
    "embed",
    "float8_linear",
    "gated_delta_rule",
    "gated_rms_norm",
    "gdn_prepare",
    "int4_linear",
    "least_rows",
    "narrow_linear",
    "plan_attention",
    "plan_recurrence",
    "qk_norm_rope_store",
    "sigmoid_gate",
    "silu_mul",
]

captures = False  # a CUDA graph would replay the sequences of the pass that it was captured from
