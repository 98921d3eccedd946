"""What a device can hold, decided before a pass starts: memory of the pools, and rows of the longest pass.

Activations are counted from the geometry. At the widest point of a linear layer a row holds the residual in FP32,
the normed input, the fused projection, the convolved q, k and v, and the rule's output; a full-attention layer
stays below that. An H200 at 27B geometry measured 88.8 KB a row (117,200 rows) where this counts 87.4.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from d3serve.model.backbone import row_bytes, slot_bytes
from d3serve.model.config import Geometry

# CUDA graphs, unmerged pieces of attention, library workspaces, what the allocator cannot join.
MARGIN_BYTES = 2 * 2**30
RULE_BYTES = 2**29  # chunk intermediates of the delta rule, whatever the length; of a short pass its share
RULE_ROWS = 8_192  # that fill a step of the rule: 256 chunks of 64, half full where each question has its own
LONGEST_PASS = 131_072  # rows; no prompt may be longer, and a longer pass gains nothing
LEAST_SLOTS = 2
MLP_ROWS = 16_384  # rows of one MLP step: 27B activations of 1.1 GB
MAX_SLOTS = 512
# A short pass may run between the steps of a long one: room for it is kept beside the longest pass.
BESIDE_ROWS = 2048
BESIDE_SLOTS = 8
SHORT_PASS = 32_768  # rows: what d3-turbo's makers have tried; a plan that holds fewer is made with thrift
SLOT_SHARE = 0.5  # of the pools' memory; a slot costs the same for any state


class Habits(NamedTuple):
    """What a plan spends beside the longest pass: slots for a short one, rows of one MLP step; and how far it goes."""

    beside_slots: int
    mlp_rows: int
    longest: int


AMPLE = Habits(BESIDE_SLOTS, MLP_ROWS, LONGEST_PASS)
# Smaller steps cost little, of INT4 more: it unpacks in each. Of four slots one is left to short passes, of three none.
THRIFTY = Habits(2, 4_096, SHORT_PASS)


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of the pools, of the longest pass and of one MLP step, in rows; `slots` counts states."""

    rows: int
    slots: int
    pass_rows: int
    mlp_rows: int = MLP_ROWS

    @property
    def beside_rows(self) -> int:
        """Rows that a long pass leaves to a short one; pools too small for that leave none."""
        return BESIDE_ROWS if self.rows >= 8 * BESIDE_ROWS else 0

    @property
    def beside_slots(self) -> int:
        """Slots that a long pass leaves to a short one."""
        return min(BESIDE_SLOTS, self.slots // 4)


def activation_bytes(
    g: Geometry, rows: int, dtype: torch.dtype, *, mlp_rows: int, unpacked_bytes: int = 0
) -> int:
    """Memory of a pass of `rows` beside weights and pools, at its widest point.

    `unpacked_bytes` of the largest INT4 matrix stand beside the MLP's activations, of a mixer's beside its own, which
    are narrower at that point than later.
    """
    values = g.linear_value_heads * g.linear_value_dim
    projected = g.conv_channels + values + 2 * g.linear_value_heads
    linear = g.hidden + projected + g.conv_channels + values
    gates = 2 * g.linear_value_heads + 2 * g.rotary_dim  # FP32
    mixing = rows * (linear * dtype.itemsize + gates * torch.float32.itemsize)
    mlp = (2 * g.hidden * rows + 3 * g.ffn * min(rows, mlp_rows)) * dtype.itemsize + unpacked_bytes
    rule = RULE_BYTES * min(rows, RULE_ROWS) // RULE_ROWS
    return rows * g.hidden * torch.float32.itemsize + max(mixing, mlp) + rule


def plan_memory(
    g: Geometry,
    dtype: torch.dtype,
    free_bytes: int,
    *,
    shares_state: bool,
    pool_bytes: int | None = None,
    unpacked_bytes: int = 0,
) -> MemoryPlan:
    """Divide what the weights leave: first the longest pass with its own K/V rows, then states to keep.

    Where that pass would be a short one, room beside it and the rows of an MLP step are cut first.

    Args:
        g: the backbone.
        dtype: of activations and pools.
        free_bytes: what the weights leave.
        shares_state: whether states are kept.
        pool_bytes: fixes the memory of the pools; then passes get what is left.
        unpacked_bytes: memory of the largest INT4 matrix while a pass uses it.

    Returns:
        The plan; where not even the shortest pass fits, it has `pass_rows` 0.
    """
    pools, a_row = pool_bytes, row_bytes(g, dtype)

    def plan(habits: Habits) -> MemoryPlan:
        def activations(rows: int) -> int:
            return activation_bytes(g, rows, dtype, mlp_rows=habits.mlp_rows, unpacked_bytes=unpacked_bytes)

        def needed(rows: int) -> int:
            return (beside + rows * a_row if pools is None else pools) + activations(rows)

        # Between its steps a long pass is not at its widest: a short one beside it has room to unpack a matrix.
        available = free_bytes - MARGIN_BYTES
        available -= activation_bytes(g, BESIDE_ROWS, dtype, mlp_rows=habits.mlp_rows)
        slots = LEAST_SLOTS + habits.beside_slots if shares_state else 1
        beside = slots * slot_bytes(g, dtype) + BESIDE_ROWS * a_row
        pass_rows = max(0, bisect_right(range(habits.longest + 1), available, key=needed) - 1)
        left = available - activations(pass_rows) if pools is None else pools
        divided = divide_pools(g, dtype, left, pass_rows=pass_rows, shares_state=shares_state)
        return replace(divided, mlp_rows=habits.mlp_rows)

    ample = plan(AMPLE)
    return ample if ample.pass_rows >= SHORT_PASS else plan(THRIFTY)


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
    rows = max(0, rows)
    return MemoryPlan(rows=rows, slots=slots, pass_rows=min(pass_rows, rows), mlp_rows=MLP_ROWS)
