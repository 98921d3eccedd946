"""Segment: one contiguous run of rows in a packed pass, and where its keys and states live."""

from typing import Literal, NamedTuple

import torch

# Who attends to long states: cuDNN and our kernel, FlashAttention-3, or that in E4M3.
LongAttention = Literal["ours", "fa3", "fp8"]


class Segment(NamedTuple):
    """Rows `[start, start + length)` of a pass: a state block, a question block or a whole prompt.

    In full attention the rows see pool rows `[prefix_start, prefix_start + prefix_length)` without a mask,
    and the segment's own keys at pool rows `[own_start, own_start + length)`: all of them, or up to the
    row itself when the mode is causal. In a linear layer the segment starts from slot `initial_slot`
    (-1: zeros) and leaves its final state in slot `final_slot` (-1: nowhere).
    """

    start: int
    length: int
    own_start: int
    prefix_start: int = 0
    prefix_length: int = 0
    initial_slot: int = -1
    final_slot: int = -1


class AttentionShape(NamedTuple):
    """What all full-attention layers of a model have in common, and where they run."""

    causal: bool  # whether a row sees its own block only up to itself
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    long: LongAttention = "ours"
