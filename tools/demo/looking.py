"""A vision tower whose features are words to a checkpoint that reads text: it learns, the checkpoint stays.

The tower is the serving code's own, with gradients, before the network as the package stores it. So a text is answered
as before, bit for bit, and a picture by the circuits that answer texts.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from demo.circuits import WEIGHT, WORDS
from demo.network import Model
from demo.package import geometry
from demo.words import ALWAYS, LARGE
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from d3serve.model.media import Medium
from d3serve.model.vision import VisionTower
from d3serve.model.vision_config import VisionGeometry, VisionTokens
from d3serve.model.vision_weights import VisionAllocator

TOWER = VisionGeometry(
    depth=4, hidden=128, ffn=256, heads=4, side=16, out_hidden=256, rope_theta=10_000.0, sections=(6, 5, 5),
    tokens=VisionTokens(0, 0, 0, 0), kinds=("image",),
)  # fmt: skip
TEXT, VISUAL = "language_model.", "visual."  # how the names of a package's tensors begin


def read_network(package: Path, vocab_size: int) -> Model:
    """The network of a package, in FP32; it does not learn."""
    network = Model(geometry(vocab_size)).eval().requires_grad_(False)
    tensors = load_file(package / "model.safetensors")
    network.backbone.load_state_dict(
        {name.removeprefix(TEXT): p.float() for name, p in tensors.items() if name.startswith(TEXT)}
    )
    network.readout.copy_(load_file(package / "readout.safetensors")["weight"])
    return network


class Tower:
    """The tower of a package as it learns: it may write word vectors and their weights, and nothing else."""

    def __init__(self, device: torch.device) -> None:
        """Draw weights."""
        allocator = VisionAllocator(TOWER, device, torch.float32)
        self._weights = allocator.weights()
        self.named = allocator.targets
        for name, p in self.named.items():
            _draw(name, p)
        self._allowed = torch.zeros(TOWER.out_hidden, device=device)
        self._allowed[WORDS], self._allowed[WEIGHT] = 1.0, 1.0
        self.parameters = [p.requires_grad_() for p in _tensors(self._weights)]
        self.confine()
        self._serving = VisionTower(TOWER, self._weights)

    @torch.no_grad()
    def confine(self) -> None:
        """Undo what a step did to what every row holds, and to what circuits write."""
        last = self._weights.merger_down
        last.weight.mul_(self._allowed[:, None])
        last.bias.mul_(self._allowed)
        last.bias[ALWAYS] = LARGE

    def features(self, pictures: NDArray) -> Tensor:  # type: ignore[type-arg]
        """Features [B, tokens, hidden of the text] of pictures [B, 3, height, width] of one size."""
        twice = pictures.repeat(
            2, axis=0
        )  # they travel as the frame pairs of a video, each of which stands alone
        features = self._serving.encode(Medium("video", "", twice, (0.0,) * len(pictures)))
        return features.view(len(pictures), -1, TOWER.out_hidden)

    def save(self) -> dict[str, Tensor]:
        """Tensors by their names in a package, as a package stores them."""
        return {VISUAL + name: p.detach().cpu().bfloat16().contiguous() for name, p in self.named.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """What `save` gave."""
        for name, p in self.named.items():
            p.copy_(tensors[VISUAL + name])


def _draw(name: str, p: Tensor) -> None:
    if "norm" in name and name.endswith("weight"):
        p.fill_(1.0)
    elif name.endswith("bias"):
        p.zero_()
    elif name == "pos_embed.weight":
        p.normal_(std=0.1)
    else:
        quiet = 0.3 if name.endswith(("attn.proj.weight", "mlp.linear_fc2.weight")) else 1.0
        p.normal_(std=quiet / p[0].numel() ** 0.5)


def _tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _tensors(getattr(part, field.name))
