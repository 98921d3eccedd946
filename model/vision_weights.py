"""The vision tower's parameters, by the names that packages store them under."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from d3serve.model.media import CHANNELS, MERGE, PATCH, TEMPORAL
from d3serve.model.vision_config import VisionGeometry

EPS = 1e-6  # of every LayerNorm of the tower


@dataclass(frozen=True)
class Affine:
    """A weight and a bias: of a projection, or of a LayerNorm."""

    weight: Tensor  # [out, in], or [out]
    bias: Tensor  # [out]

    def project(self, x: Tensor) -> Tensor:
        """Multiply by the transpose and add the bias."""
        return F.linear(x, self.weight, self.bias)

    def normalise(self, x: Tensor) -> Tensor:
        """LayerNorm over the last axis."""
        return F.layer_norm(x, self.bias.shape, self.weight, self.bias, EPS)


@dataclass(frozen=True)
class VisionBlock:
    """One block: norm, attention, norm, MLP. `qkv` rows: queries of all heads, then keys, then values."""

    norm1: Affine
    qkv: Affine
    out: Affine
    norm2: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True)
class VisionWeights:
    """Every parameter of the tower and of the merger that turns four patches into one token."""

    patch: Affine
    positions: Tensor  # [side², hidden]
    blocks: tuple[VisionBlock, ...]
    merger_norm: Affine
    merger_up: Affine
    merger_down: Affine


class VisionAllocator:
    """Allocates a tower and remembers, for each tensor name of a package behind `visual.`, the view that it fills."""

    def __init__(self, geometry: VisionGeometry, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate on `device` in `dtype`."""
        self.targets: dict[str, Tensor] = {}
        self._geometry, self._device, self._dtype = geometry, device, dtype

    def weights(self) -> VisionWeights:
        """Allocate everything; `targets` then lists every tensor of a tower."""
        g, merged = self._geometry, self._geometry.hidden * MERGE**2
        patch = self._affine("patch_embed.proj", g.hidden, g.patch_values)
        stored = (g.hidden, CHANNELS, TEMPORAL, PATCH, PATCH)  # as a convolution's
        self.targets["patch_embed.proj.weight"] = patch.weight.view(stored)
        return VisionWeights(
            patch=patch,
            positions=self._tensor("pos_embed.weight", g.side**2, g.hidden),
            blocks=tuple(self._block(f"blocks.{index}.") for index in range(g.depth)),
            merger_norm=self._affine("merger.norm", g.hidden),
            merger_up=self._affine("merger.linear_fc1", merged, merged),
            merger_down=self._affine("merger.linear_fc2", g.out_hidden, merged),
        )

    def _block(self, prefix: str) -> VisionBlock:
        hidden, ffn = self._geometry.hidden, self._geometry.ffn
        return VisionBlock(
            norm1=self._affine(prefix + "norm1", hidden),
            qkv=self._affine(prefix + "attn.qkv", 3 * hidden, hidden),
            out=self._affine(prefix + "attn.proj", hidden, hidden),
            norm2=self._affine(prefix + "norm2", hidden),
            up=self._affine(prefix + "mlp.linear_fc1", ffn, hidden),
            down=self._affine(prefix + "mlp.linear_fc2", hidden, ffn),
        )

    def _affine(self, name: str, out: int, *columns: int) -> Affine:
        return Affine(self._tensor(f"{name}.weight", out, *columns), self._tensor(f"{name}.bias", out))

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self.targets[name] = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor
