"""What a device can hold, decided before a pass starts: memory of the pools, and rows of the longest pass.

Activations are counted from the geometry. At the widest point of a linear layer a row holds the residual in FP32,
the normed input, the fused projection, the convolved q, k and v, and the rule's output; a full-attention layer
stays below that. An H200 at 27B geometry measured 88.8 KB a row (117,200 rows) where this counts 87.4.
"""

from bisect import bisect_right
from dataclasses import dataclass

import torch

from d3serve.model.backbone import row_bytes, slot_bytes
from d3serve.model.config import Geometry

# CUDA graphs, unmerged pieces of attention, library workspaces, what the allocator cannot join.
MARGIN_BYTES = 2 * 2**30
RULE_BYTES = 2**29  # chunk intermediates of the delta rule, whatever the length
LONGEST_PASS = 131_072  # rows; no prompt may be longer, and a longer pass gains nothing
LEAST_SLOTS = 2
MLP_ROWS = 16_384  # rows of one MLP step: 27B activations of 1.1 GB
MAX_SLOTS = 512
# A short pass may run between the steps of a long one: room for it is kept beside the longest pass.
BESIDE_ROWS = 2048
BESIDE_SLOTS = 8
SLOT_SHARE = 0.5  # of the pools' memory; a slot costs the same for any state


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of the pools and of the longest pass, in rows; `slots` counts states."""

    rows: int
    slots: int
    pass_rows: int

    @property
    def beside_rows(self) -> int:
        """Rows that a long pass leaves to a short one; pools too small for that leave none."""
        return BESIDE_ROWS if self.rows >= 8 * BESIDE_ROWS else 0

    @property
    def beside_slots(self) -> int:
        """Slots that a long pass leaves to a short one."""
        return min(BESIDE_SLOTS, self.slots // 4)


def activation_bytes(g: Geometry, rows: int, dtype: torch.dtype, *, mlp_rows: int) -> int:
    """Memory of a pass of `rows` beside weights and pools, at its widest point."""
    values = g.linear_value_heads * g.linear_value_dim
    projected = g.conv_channels + values + 2 * g.linear_value_heads
    linear = g.hidden + projected + g.conv_channels + values
    gates = 2 * g.linear_value_heads + 2 * g.rotary_dim  # FP32
    mixing = rows * (linear * dtype.itemsize + gates * torch.float32.itemsize)
    mlp = (2 * g.hidden * rows + 3 * g.ffn * min(rows, mlp_rows)) * dtype.itemsize
    return rows * g.hidden * torch.float32.itemsize + max(mixing, mlp) + RULE_BYTES


def plan_memory(
    g: Geometry,
    dtype: torch.dtype,
    free_bytes: int,
    *,
    mlp_rows: int,
    shares_state: bool,
    pool_bytes: int | None = None,
) -> MemoryPlan:
    """Divide what the weights leave: first the longest pass with its own K/V rows, then states to keep.

    `pool_bytes` fixes the memory of the pools; then passes get what is left. Where not even the shortest
    pass fits, the plan has `pass_rows` 0.
    """
    available = free_bytes - MARGIN_BYTES - activation_bytes(g, BESIDE_ROWS, dtype, mlp_rows=mlp_rows)
    a_row = row_bytes(g, dtype) if pool_bytes is None else 0  # fixed pools already hold the rows
    least = (LEAST_SLOTS + BESIDE_SLOTS) * slot_bytes(g, dtype) if shares_state else slot_bytes(g, dtype)
    beside = least + BESIDE_ROWS * a_row if pool_bytes is None else pool_bytes

    def needed(rows: int) -> int:
        return beside + rows * a_row + activation_bytes(g, rows, dtype, mlp_rows=mlp_rows)

    pass_rows = max(0, bisect_right(range(LONGEST_PASS + 1), available, key=needed) - 1)
    if pool_bytes is None:
        pool_bytes = available - activation_bytes(g, pass_rows, dtype, mlp_rows=mlp_rows)
    return divide_pools(g, dtype, pool_bytes, pass_rows=pass_rows, shares_state=shares_state)


def divide_pools(
    g: Geometry, dtype: torch.dtype, pool_bytes: int, *, pass_rows: int = LONGEST_PASS, shares_state: bool
) -> MemoryPlan:
    """Rows for the longest pass first, then up to half of the memory for slots, then rows for more states."""
    a_row, a_slot = row_bytes(g, dtype), max(1, slot_bytes(g, dtype))  # no linear layers: slots cost nothing
    slots = 1
    if shares_state:
        beside_a_pass = (pool_bytes - (pass_rows + BESIDE_ROWS) * a_row) // a_slot
        least = LEAST_SLOTS if pool_bytes >= LEAST_SLOTS * a_slot else 1
        slots = max(least, min(MAX_SLOTS, int(pool_bytes * SLOT_SHARE) // a_slot, beside_a_pass))
    rows = (pool_bytes - slots * a_slot) // max(1, a_row)
    return MemoryPlan(rows=max(0, rows), slots=slots, pass_rows=min(pass_rows, max(0, rows)))
