"""The operations of a pass as one set: the fast kernels for a GPU, plain PyTorch for a CPU.

A pass builds one plan for its full-attention layers and one for its linear layers, and every layer uses them. A plan
goes back only to the set that made it, which alone knows what is in it: what takes one takes Any. Shapes and formulas
are documented in `d3serve.kernels.reference`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from d3serve.kernels import reference
from d3serve.kernels.attention_plan import Sizes as AttentionSizes
from d3serve.kernels.matrix import Float8Matrix, Int4Matrix, Matrix, Rows, StackedMatrix
from d3serve.kernels.recurrence_plan import RecurrenceSizes
from d3serve.kernels.segments import AttentionShape, Segment

LinearRule = Literal["ours", "fla"]
NARROW = 128  # rows of a weight within a stack: gates, for which libraries have no good tiles


class AttentionCut(Protocol):
    """How the full-attention layers of a pass are cut."""

    @property
    def partials(self) -> int:
        """What the sizes of a padded plan must have room for."""


class PlannedAttention(Protocol):
    """The full-attention layers of a pass, ready to run."""

    @property
    def pairs(self) -> int:
        """How many pairs of a query row and a key a layer attends to."""


class Operations(Protocol):
    """What a backbone asks of a device; `reference`, `fast` and `fast_fla` are modules of this shape."""

    captures: bool  # whether a CUDA graph captured from one pass may serve others of its bucket
    least_rows: int  # products of fewer take longer: rows that nobody reads are put in

    def cut_attention(self, segments: Sequence[Segment], shape: AttentionShape) -> AttentionCut:
        """Decide how the full-attention layers of a pass are cut."""

    def plan_attention(
        self, cut: Any, shape: AttentionShape, *, sizes: AttentionSizes | None = None
    ) -> PlannedAttention:
        """Prepare the full-attention layers of a cut pass.

        `sizes` pad a plan for the GPU, so that what is launched does not depend on its contents.
        """

    def plan_recurrence(
        self, segments: Sequence[Segment], *, device: torch.device, sizes: RecurrenceSizes | None = None
    ) -> object:
        """Prepare the linear layers of a pass (states stand before questions); `sizes` pads a plan for the GPU."""

    def attention_steps(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, plan: Any, *, softmax_scale: float
    ) -> Iterator[int]:
        """Attend from each segment's rows to its prefix and its own block, into `out`, in bounded steps.

        Yields, after each step, how many pairs of a query row and a key it was.
        """

    def gdn_prepare(
        self,
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

    def gated_delta_rule(
        self,
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

    def embed(self, tokens: Tensor, table: Tensor, /) -> Tensor:
        """Take a row of the table [vocab, h] for each token: [T, h]."""

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
        """Add to the residual stream and normalise; quantize what is normed if it meets an FP8 weight next.

        `both` keeps what is normed beside what is quantized, for a plain weight.
        """

    def qk_norm_rope_store(
        self,
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

    def sigmoid_gate(self, attn: Tensor, qkv: Tensor) -> Tensor:
        """Multiply attention's output by the sigmoid of the gate in `qkv`."""

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise each value head and multiply by silu(z)."""

    def silu_mul(self, gate_up: Tensor, *, float8: bool = False) -> Rows:
        """silu(gate)·up of one fused projection, quantized if it meets an FP8 weight next."""

    def narrow_linear(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Multiply x [T, columns] by the transpose of a narrow weight [rows, columns] into `out` [T, rows]."""

    def float8_linear(self, x: Rows, weight: Float8Matrix, out: Tensor | None = None) -> Tensor:
        """Multiply x [T, columns] by the transpose of an FP8 weight [rows, columns]: [T, rows] or `out`."""

    def int4_linear(self, x: Tensor, weight: Int4Matrix, out: Tensor | None = None) -> Tensor:
        """Multiply x [T, columns] by the transpose of a four-bit weight [rows, columns]: [T, rows] or `out`."""


def operations(device: torch.device, linear_rule: LinearRule = "ours") -> Operations:
    """The set for `device`. Triton comes in with the fast ones, so a machine without a GPU never needs it.

    `linear_rule` says whose gated delta rule runs on a GPU; fla comes in with its own set.
    """
    if device.type != "cuda":
        return reference
    if linear_rule == "fla":
        from d3serve.kernels import fast_fla  # noqa: PLC0415 # imports fla

        return fast_fla
    from d3serve.kernels import fast  # noqa: PLC0415 # imports triton

    return fast


def linear(x: Rows, weight: Matrix, out: Tensor | None = None) -> Tensor:
    """Multiply x [T, columns] by the transpose of a weight [rows, columns] of any kind: [T, rows] or `out`.

    Raises:
        ValueError: rows of which only quantized ones are left meet a plain weight.
    """
    if isinstance(weight, StackedMatrix):
        return _stacked_linear(x, weight, out)
    if isinstance(weight, Float8Matrix):
        return operations(weight.values.device).float8_linear(x, weight, out)
    plain = _plain(x)
    if isinstance(weight, Int4Matrix):
        return operations(weight.values.device).int4_linear(plain, weight, out)
    return F.linear(plain, weight) if out is None else torch.mm(plain, weight.T, out=out)


def _stacked_linear(x: Rows, weight: StackedMatrix, out: Tensor | None) -> Tensor:
    """Each part writes its own columns."""
    if out is None:
        device = (x if isinstance(x, Tensor) else x.values).device
        out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=device)
    columns = torch.split(out, [part.shape[0] for part in weight.parts], dim=1)
    for part, its_columns in zip(weight.parts, columns, strict=True):
        if isinstance(part, Tensor) and part.shape[0] <= NARROW:
            operations(part.device).narrow_linear(_plain(x), part, its_columns)
        else:
            linear(x, part, out=its_columns)
    return out


def _plain(x: Rows) -> Tensor:
    plain = x if isinstance(x, Tensor) else x.plain
    if plain is None:
        raise ValueError("quantized rows meet a plain weight")
    return plain
