"""Weights drawn at random at a given geometry: for measuring speed and memory, and for parity."""

import math

import torch

from d3serve.model.config import CODES, Geometry
from d3serve.model.vision_config import VisionGeometry
from d3serve.model.vision_weights import VisionAllocator, VisionWeights
from d3serve.model.weights import Allocator, Weights

SEED = 20_260_919


def random_weights(
    geometry: Geometry, device: torch.device, dtype: torch.dtype
) -> tuple[Weights, dict[str, torch.Tensor]]:
    """Draw weights under which activations keep their size and a state's memory reaches its last token.

    Returns:
        The weights, and the same tensors by their names in a package (views, nothing is copied).
    """
    generator = torch.Generator(device).manual_seed(SEED)
    allocator = Allocator(geometry, device, dtype)
    weights = allocator.weights(CODES)
    for name, tensor in allocator.targets.items():
        _fill(name, tensor, generator)
    weights.readout.normal_(std=1.5 / math.sqrt(geometry.hidden), generator=generator)
    return weights, allocator.targets


def random_tower(
    geometry: VisionGeometry, device: torch.device, dtype: torch.dtype
) -> tuple[VisionWeights, dict[str, torch.Tensor]]:
    """Draw a vision tower in the same way; its features have the size of embeddings."""
    generator = torch.Generator(device).manual_seed(SEED)
    allocator = VisionAllocator(geometry, device, dtype)
    weights = allocator.weights()
    for name, tensor in allocator.targets.items():
        if "norm" in name and name.endswith("weight"):
            tensor.uniform_(0.8, 1.2, generator=generator)
        elif name.endswith("bias"):
            tensor.normal_(std=0.1, generator=generator)
        elif name == "pos_embed.weight":
            tensor.normal_(std=1.0, generator=generator)
        else:
            gain = 2.0 if name == "merger.linear_fc2.weight" else 1.0
            tensor.normal_(std=gain / math.sqrt(tensor[0].numel()), generator=generator)
    return weights, allocator.targets


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith("A_log"):  # slow decay: half of the heads remember hundreds of tokens
        tensor.uniform_(-8.0, -1.0, generator=generator)
    elif name.endswith("dt_bias"):
        tensor.uniform_(-1.0, 1.0, generator=generator)
    elif name.endswith("linear_attn.norm.weight"):
        tensor.uniform_(0.5, 1.5, generator=generator)
    elif name.endswith("norm.weight"):
        tensor.uniform_(-0.2, 0.2, generator=generator)
    elif name == "embed_tokens.weight":
        tensor.normal_(std=1.0, generator=generator)
    else:
        tensor.normal_(std=1 / math.sqrt(tensor[0].numel()), generator=generator)
