"""A small vision tower for the small checkpoint: its configuration and weights, the same every time."""

from typing import Any

import torch
from torch import Tensor

# A head of 24, like the published 72 no power of two.
DEPTH, HIDDEN, FFN, HEADS, SIDE = 2, 48, 80, 2, 5
PATCH = (3, 2, 16, 16)


def vision_config(out_hidden: int) -> dict[str, Any]:
    """The `vision_config` of config.json."""
    return {
        "model_type": "qwen3_5_vision",
        "depth": DEPTH,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_heads": HEADS,
        "out_hidden_size": out_hidden,
        "num_position_embeddings": SIDE**2,
    }


def draw_tower(out_hidden: int, seed: int) -> dict[str, Tensor]:
    """Draw weights whose features have the size of embeddings and tell patches, places and pairs apart."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std + mean).to(torch.bfloat16)

    tensors = {
        "patch_embed.proj.weight": normal(HIDDEN, *PATCH, std=1536**-0.5),
        "patch_embed.proj.bias": normal(HIDDEN, std=0.1),
        "pos_embed.weight": normal(SIDE**2, HIDDEN, std=0.5),
    }
    merged = 4 * HIDDEN
    products = {"merger.linear_fc1": (merged, merged, 1.0), "merger.linear_fc2": (out_hidden, merged, 2.0)}
    norms = ["merger.norm"]
    for block in range(DEPTH):
        prefix = f"blocks.{block}."
        norms += [prefix + "norm1", prefix + "norm2"]
        products |= {
            prefix + "attn.qkv": (3 * HIDDEN, HIDDEN, 1.5),
            prefix + "attn.proj": (HIDDEN, HIDDEN, 1.0),
            prefix + "mlp.linear_fc1": (FFN, HIDDEN, 1.0),
            prefix + "mlp.linear_fc2": (HIDDEN, FFN, 1.0),
        }
    for name, (rows, columns, gain) in products.items():
        tensors[f"{name}.weight"] = normal(rows, columns, std=gain * columns**-0.5)
        tensors[f"{name}.bias"] = normal(rows, std=0.1)
    for name in norms:
        tensors[f"{name}.weight"] = normal(HIDDEN, std=0.1, mean=1.0)
        tensors[f"{name}.bias"] = normal(HIDDEN, std=0.1)
    return tensors
