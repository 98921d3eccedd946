"""The fast kernels as one set of `Operations`."""

from d3serve.kernels.convolution import gdn_prepare
from d3serve.kernels.float8 import float8_linear
from d3serve.kernels.fused import (
    add_rms_norm,
    embed,
    gated_rms_norm,
    qk_norm_rope_store,
    sigmoid_gate,
    silu_mul,
)
from d3serve.kernels.gated_delta import gated_delta_rule
from d3serve.kernels.int4 import int4_linear
from d3serve.kernels.narrow import narrow_linear
from d3serve.kernels.prefix_bidir import attention_steps, cut_attention, plan_attention
from d3serve.kernels.recurrence_plan import plan_recurrence

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

captures = True
least_rows = 64  # of 17,408 columns one row takes the library 0.4 ms, 64 take 0.05
