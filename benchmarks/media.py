"""States that show images and videos: the engine against its floor and transformers, on the same GPU in one run.

    python benchmarks/media.py --out DIR [--no-peers] [--tiny]

Random BF16 weights at the 27B geometry with its vision tower. Engine time is token ids and decoded frames in,
probabilities out; decoding files is measured elsewhere. A row's floor is that of a text of as many tokens
(`engine.py`) and the tower's products and attention. Transformers' time is that of its own tower, once, and of its
best way through a text of as many tokens: features in place of embeddings change no time. Nothing is timed before
both towers' features agree, and both engines' answers.
"""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ceilings
import numpy as np
import torch
import torch.nn.functional as F
from engine import Bench, check, measure
from engine_rows import Row
from geometries import GEOMETRY_27B, GEOMETRY_TINY, VISION_27B, VISION_TINY
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from d3serve.model.config import Geometry
from d3serve.model.media import MERGE, Medium
from d3serve.model.media_prompt import PlacedMedia
from d3serve.model.mrope import Span
from d3serve.model.passes import PreparedJob
from d3serve.model.random_weights import random_tower
from d3serve.model.vision import VisionTower, patch_rows
from d3serve.model.vision_config import VisionGeometry

TEXT, QUESTION_TOKENS = 150, 100  # tokens of a state beside its media, and of a question
MARKERS, TIMED_MARKERS = 2, 9  # tokens around an image, and around a frame pair with its time
PEERS = ("state_once_ms", "one_by_one_ms", "one_batch_ms")


def photo(seed: int, side: int = 1280) -> Medium:
    """A picture of 1,600 tokens at the default side, the most that an image has."""
    return Medium("image", f"photo {seed}", _noise(seed, 1, side, side))


def clip(seed: int, pairs: int = 11, height: int = 320, width: int = 576) -> Medium:
    """Eleven seconds of 720p, as they are sampled: 22 frames of 180 tokens a pair."""
    return Medium(
        "video", f"clip {seed}", _noise(seed, 2 * pairs, height, width), tuple(map(float, range(pairs)))
    )


def _noise(seed: int, count: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, height, width), dtype=np.uint8)


@dataclass(frozen=True)
class MediaRow(Row):
    """A request whose state shows `media`; `state` counts them."""

    media: tuple[Medium, ...] = ()


def row_of(name: str, media: Sequence[Medium], questions: int, *, cached: bool = False) -> MediaRow:
    """A row of one job."""
    around = sum(max(MARKERS, TIMED_MARKERS * len(medium.seconds)) for medium in media)
    state = TEXT + around + sum(medium.pads for medium in media)
    return MediaRow(name, state, questions, QUESTION_TOKENS, cached=cached, media=tuple(media))


def placed(media: Sequence[Medium]) -> PlacedMedia:
    """Where media stand in a state that begins with half of its text."""
    spans, start = [], TEXT // 2
    for medium in media:
        pairs, rows, columns = medium.grid
        own = []
        for _ in range(pairs):
            start += 1 if medium.kind == "image" else TIMED_MARKERS - 1
            own.append(Span(start, rows // MERGE, columns // MERGE))
            start = own[-1].stop + 1
        spans.append(tuple(own))
    return PlacedMedia(tuple(media), tuple(spans), start - TEXT // 2)


def rows_of(*, tiny: bool) -> tuple[Row, ...]:
    """The published requests, the same photo asked about again, and a text of as many tokens beside it."""
    photos = [photo(n, 64 if tiny else 1280) for n in range(3)]
    video = clip(3, 3, 64, 64) if tiny else clip(3)
    again = row_of("one photo cached, 8 questions", photos[:1], 8, cached=True)
    return (
        row_of("one photo, 1 question", photos[:1], 1),
        row_of("one photo, 8 questions", photos[:1], 8),
        row_of("three photos, 6 questions", photos, 6),
        row_of("11 s of 720p, 6 questions", [video], 6),
        again,
        Row("a text of as many tokens cached, 8 questions", again.state, 8, QUESTION_TOKENS, cached=True),
    )


class MediaBench(Bench):
    """A bench with a vision tower, and transformers' on the same weights."""

    def __init__(
        self, geometry: Geometry, vision: VisionGeometry, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Draw the weights on the device."""
        super().__init__(geometry, device, dtype)
        self.vision = vision
        weights, self.named_tower = random_tower(vision, device, dtype)
        self.tower: VisionTower = VisionTower(vision, weights)

    def jobs(self, row: Row) -> list[PreparedJob]:
        """The jobs of a row, over fresh states that show its media."""
        jobs = super().jobs(row)
        return [replace(job, media=placed(row.media)) for job in jobs] if isinstance(row, MediaRow) else jobs

    def transformers_tower(self, dtype: torch.dtype) -> Qwen3_5VisionModel:
        """Transformers' tower over the same numbers."""
        g = self.vision
        config = Qwen3_5VisionConfig(
            depth=g.depth, hidden_size=g.hidden, intermediate_size=g.ffn, num_heads=g.heads,
            out_hidden_size=g.out_hidden, num_position_embeddings=g.side**2, attn_implementation="sdpa",
        )  # fmt: skip
        with self.device:
            model = Qwen3_5VisionModel(config).eval()
        model.load_state_dict(self.named_tower)
        return model.to(dtype)


@torch.inference_mode()
def check_tower(bench: MediaBench) -> str:
    """How far both towers' features are from FP32; raises SystemExit where ours are farther than twice theirs."""
    medium = photo(9, 512)
    rows = patch_rows(torch.from_numpy(medium.frames).to(bench.device))
    grid = torch.tensor([medium.grid], device=bench.device)
    exact, rounded = (
        bench.transformers_tower(dtype)(rows, grid_thw=grid).pooler_output.float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours, theirs = (
        float((each - exact).square().mean().sqrt()) for each in (bench.tower.encode(medium), rounded)
    )
    told = f"features, rms from FP32: ours {ours:.5f}, transformers in BF16 {theirs:.5f}"
    if ours > 2 * theirs:
        raise SystemExit(f"parity does not hold, so nothing is timed:\n{told}")
    return told


def tower_floor_ms(bench: MediaBench, medium: Medium) -> float:
    """The tower's products and the better of two libraries' attention for one medium, each in a graph."""
    g, (pairs, rows, columns) = bench.vision, medium.grid
    named = dict(bench.named_tower)
    matrices = [named[name].flatten(1) for name in named if named[name].ndim > 1 and "pos_embed" not in name]
    merger = [matrix for matrix in matrices if matrix.shape[1] == g.hidden * MERGE**2]
    blocks = [matrix for matrix in matrices if matrix.shape[1] != g.hidden * MERGE**2]
    products = ceilings.gemms_ms(blocks, pairs * rows * columns) + ceilings.gemms_ms(merger, medium.pads)
    shape = (pairs, g.heads, rows * columns, g.head_dim)
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
    best = float("inf")
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            try:
                graph = ceilings.in_graph(lambda: F.scaled_dot_product_attention(query, key, value))
                best = min(best, ceilings.timed_ms(graph, repeats=10))
            except RuntimeError:
                continue  # this backend refuses the shape; the other decides
    return products + g.depth * best


@torch.inference_mode()
def towers_ms(bench: MediaBench, row: MediaRow) -> dict[str, float]:
    """Time of our tower over a row's media, and of transformers' in one call for each kind."""
    theirs = bench.transformers_tower(torch.bfloat16)
    calls = []
    for kind in ("image", "video"):
        media = [medium for medium in row.media if medium.kind == kind]
        if media:
            rows = torch.cat(
                [patch_rows(torch.from_numpy(medium.frames).to(bench.device)) for medium in media]
            )
            calls.append((rows, torch.tensor([medium.grid for medium in media], device=bench.device)))

    def ours() -> None:
        for medium in row.media:
            bench.tower.encode(medium)

    def peers() -> None:
        for rows, grid in calls:
            theirs(rows, grid_thw=grid)

    return {
        "tower_ms": ceilings.timed_ms(ours, repeats=10, warmup=2),
        "peer_tower_ms": ceilings.timed_ms(peers, repeats=10, warmup=2),
    }


def measured(bench: MediaBench, row: Row, *, peers: bool, floors: bool) -> dict[str, Any]:
    """One row: ours, the floor with the tower's, transformers with its tower."""
    result = measure(bench, row, peers=peers, profile=False, floors=floors)
    if bench.device.type != "cuda" or row.cached or not isinstance(row, MediaRow):
        return result
    result |= towers_ms(bench, row)
    if floors:
        result["tower_floor"] = sum(tower_floor_ms(bench, medium) for medium in row.media)
        result["floor"] += result["tower_floor"]
    for name in PEERS:
        if name in result:
            result[name] += result["peer_tower_ms"]
    return result


HEAD = (
    "request", "tokens", "ours ms", "tower ms", "floor ms", "ours ÷ floor",
    "transformers, best ms", "its tower ms", "÷ ours", "peak GB",
)  # fmt: skip


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as markdown."""
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *map(_cells, results))
    )


def _cells(r: dict[str, Any]) -> list[str]:
    best = min((r[name] for name in PEERS if name in r), default=None)
    return [
        r["row"], str(r["tokens"]), f"{r['ours_ms']:.1f}", _shown(r.get("tower_ms"), 1), _shown(r.get("floor"), 1),
        _shown(r["ours_ms"] / r["floor"] if "floor" in r else None, 2), _shown(best, 0),
        _shown(r.get("peer_tower_ms"), 1), _shown(best and best / r["ours_ms"], 1), f"{r.get('peak_gb', 0):.1f}",
    ]  # fmt: skip


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small geometry, to try the script itself")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    geometries = (GEOMETRY_TINY, VISION_TINY) if options.tiny else (GEOMETRY_27B, VISION_27B)
    bench = MediaBench(*geometries, device, torch.bfloat16 if on_gpu else torch.float32)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor(),
        "torch": torch.__version__,
        "parity": [*check(bench), check_tower(bench)],
    }
    print("\n".join(report["parity"]), flush=True)
    results: list[dict[str, Any]] = report.setdefault("rows", [])
    for row in rows_of(tiny=options.tiny):
        results.append(measured(bench, row, peers=not options.no_peers, floors=on_gpu and not options.tiny))
        print(json.dumps(results[-1]), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "media.json").write_text(json.dumps(report, indent=1))
    print(table(results))
    if options.out:
        (options.out / "media.md").write_text(table(results) + "\n")


if __name__ == "__main__":
    main()
