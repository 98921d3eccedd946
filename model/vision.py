"""VisionTower: frames to the features that stand where a state's prompt has pads.

Each medium runs by itself, so that its features have the same bits in any company. Within it attention sees one image,
or one pair of a video's frames: all of one size, hence a batch.
"""

from collections.abc import Generator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from d3serve.model.media import CHANNELS, MERGE, PATCH, TEMPORAL, Medium
from d3serve.model.vision_config import VisionGeometry
from d3serve.model.vision_weights import VisionBlock, VisionWeights

HALF = 127.5  # pixels of 0 to 255 become -1 to 1
LARGEST_PATCHES = 16 * 196 * MERGE**2  # of a medium: 16 frame pairs of 196 tokens each; an image has 6,400

TowerSteps = Generator[int, None, Tensor]  # yields the floating-point operations of each block


def patch_rows(frames: Tensor) -> Tensor:
    """Cut frames [T, 3, height, width] uint8 into the tower's rows, [patches, 3·2·16·16] FP32.

    One frame stands for both of a patch. Rows stand in blocks of 2 × 2 patches, which become one token each.
    """
    if len(frames) == 1:
        frames = frames.expand(TEMPORAL, -1, -1, -1)
    count, _, height, width = frames.shape
    blocks = (height // PATCH // MERGE, MERGE, PATCH, width // PATCH // MERGE, MERGE, PATCH)
    cut = frames.view(count // TEMPORAL, TEMPORAL, CHANNELS, *blocks).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    rows = cut.reshape(-1, CHANNELS * TEMPORAL * PATCH**2).float()
    return (rows - HALF) / HALF


def tower_activation_bytes(g: VisionGeometry, dtype: torch.dtype) -> int:
    """Memory that the largest medium takes beside the weights, at the widest point of a block or at its rows."""
    full = torch.float32.itemsize
    rows = 3 * g.patch_values * full  # while they are normalised
    kept = 2 * g.hidden * dtype.itemsize + g.head_dim * full  # x, what it was before a sum, cos and sin
    attention = (
        9 * g.hidden * dtype.itemsize + 4 * g.hidden * full
    )  # qkv, turned and attended; turning in FP32
    mlp = (2 * g.hidden + 2 * g.ffn) * dtype.itemsize
    return LARGEST_PATCHES * max(rows, kept + attention, kept + mlp)


class VisionTower:
    """Turns one medium into features, [pads, hidden of the backbone] in the type of its weights."""

    def __init__(self, geometry: VisionGeometry, weights: VisionWeights) -> None:
        """Take ownership of `weights`."""
        self.geometry = geometry
        self._weights = weights
        self._device, self._dtype = weights.positions.device, weights.positions.dtype
        half = geometry.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        self._frequencies = (1.0 / geometry.rope_theta**exponents).to(self._device)

    def encode(self, medium: Medium) -> Tensor:
        """Run a medium through every block."""
        steps = self.steps(medium)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                features: Tensor = end.value
                return features

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the smallest image, the largest, and a long video, so that no client waits for a library to begin."""
        for count, side in ((1, 256), (1, 1280), (32, 448)):
            frames = np.zeros((count, CHANNELS, side, side), dtype=np.uint8)
            times = (0.0,) * (count // TEMPORAL)
            self.encode(Medium("video" if times else "image", "", frames, times))

    def work(self, medium: Medium) -> int:
        """Floating-point operations of the blocks for a medium: the sum of what `steps` yields."""
        pairs, rows, columns = medium.grid
        return self.geometry.depth * self._block_flops(pairs, rows * columns)

    def steps(self, medium: Medium) -> TowerSteps:
        """Run a medium as `encode` does, yielding after each block: some 2 ms of an H200 for the largest."""
        pairs, rows, columns = medium.grid
        row, column = _coordinates(rows, columns, self._device)
        pixels = patch_rows(torch.from_numpy(medium.frames).to(self._device)).to(self._dtype)
        x = self._weights.patch.project(pixels).view(pairs, rows * columns, -1)
        del pixels
        x = x + self._positions(row, rows, column, columns)
        angles = torch.cat((row[:, None] * self._frequencies, column[:, None] * self._frequencies), dim=-1)
        rotary = angles.cos(), angles.sin()
        for block in self._weights.blocks:
            x = x + self._attend(block, block.norm1.normalise(x), rotary)
            x = x + block.down.project(F.gelu(block.up.project(block.norm2.normalise(x)), approximate="tanh"))
            yield self._block_flops(pairs, rows * columns)
        merged = self._weights.merger_norm.normalise(x).view(medium.pads, -1)
        return self._weights.merger_down.project(F.gelu(self._weights.merger_up.project(merged)))

    def _attend(self, block: VisionBlock, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Attention of each image or frame pair over itself: [pairs, patches, hidden] to the same."""
        g = self.geometry
        qkv = block.qkv.project(x).view(*x.shape[:2], 3, g.heads, g.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [pairs, heads, patches, head_dim]
        attended = F.scaled_dot_product_attention(_turned(query, *rotary), _turned(key, *rotary), value)
        return block.out.project(attended.transpose(1, 2).reshape(x.shape))

    def _positions(self, row: Tensor, rows: int, column: Tensor, columns: int) -> Tensor:
        """The table of positions, bilinear between its corners: [patches, hidden]; summed in FP32."""
        side, table = self.geometry.side, self._weights.positions
        total = torch.zeros(len(row), table.shape[1], dtype=torch.float32, device=table.device)
        for at_row, of_row in _taps(row, rows, side):
            for at_column, of_column in _taps(column, columns, side):
                total += table[at_row * side + at_column] * (of_row * of_column)[:, None]
        return total.to(table.dtype)

    def _block_flops(self, pairs: int, patches: int) -> int:
        g = self.geometry
        products = 2 * g.hidden * (4 * g.hidden + 2 * g.ffn)
        return pairs * patches * (products + 4 * patches * g.hidden)


def _coordinates(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch of a frame, FP32, in the order of `patch_rows`."""
    grid = torch.meshgrid(
        torch.arange(rows, dtype=torch.float32, device=device),
        torch.arange(columns, dtype=torch.float32, device=device),
        indexing="ij",
    )
    blocks = (rows // MERGE, MERGE, columns // MERGE, MERGE)
    row, column = (each.reshape(blocks).transpose(1, 2).reshape(-1) for each in grid)
    return row, column


def _taps(coordinate: Tensor, size: int, side: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """The two entries of a table's axis around each coordinate of `size`, and their weights."""
    source = coordinate * (side - 1) / max(size - 1, 1)
    low = source.floor()
    weight = source - low
    at = low.long()
    return (at, 1 - weight), ((at + 1).clamp(max=side - 1), weight)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of halves in FP32, [..., patches, head_dim], and round back."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
