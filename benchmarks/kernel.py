"""The attention kernel against cuDNN and flash SDPA on the same rows: parity first, then times of one layer.

    python benchmarks/kernel.py [--rows "512 x 24576,150 + 100"] [--out FOLDER]

Geometry: the 27B, 24 query heads over 4 key/value heads, width 256, BF16. The peers get each question as a row of
a batch with its state's keys already copied beside its own, and the copies are not timed. Times are medians of
rounds in which all take turns, so that none runs on cooler silicon; short ones are replayed in a CUDA graph.
"""

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from ceilings import timed_ms
from geometries import GEOMETRY_27B
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from d3serve.kernels.prefix_bidir import cut_attention, plan_attention, prefix_bidir_attention
from d3serve.kernels.segments import AttentionShape, Segment

G = GEOMETRY_27B
SCALE = G.head_dim**-0.5
ROUNDS = 3
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Batch(NamedTuple):
    """`count` blocks of `rows` query rows over `keys` keys: how a library is asked for the same work."""

    count: int
    rows: int
    keys: int


class Case(NamedTuple):
    """The same work twice: as segments for our kernel, as batches for a library."""

    segments: list[Segment]
    batches: list[Batch]


def cached(count: int, length: int, state: int) -> Case:
    """Questions on a state that is in the cache."""
    segments = [Segment(i * length, length, state + i * length, 0, state) for i in range(count)]
    return Case(segments, [Batch(count, length, state + length)])


def merged(rows: int, keys: int) -> Case:
    """Rows over keys and nothing else: four questions whose own keys count among them."""
    length = rows // 4
    segments = [Segment(i * length, length, keys - length + i * length, 0, keys - length) for i in range(4)]
    return Case(segments, [Batch(1, rows, keys)])


def with_states(states: int, state: int, questions: int, length: int) -> Case:
    """New states, then their questions."""
    segments = [Segment(i * state, state, i * state) for i in range(states)]
    row = states * state
    for i in range(states):
        for _ in range(questions):
            segments.append(Segment(row, length, row, i * state, state))
            row += length
    return Case(segments, [Batch(states, state, state), Batch(states * questions, length, state + length)])


def dense(rows: int) -> Case:
    """One state, every row sees every key."""
    return Case([Segment(0, rows, 0)], [Batch(1, rows, rows)])


CASES = {
    "512 x 2048": merged(512, 2_048),
    "512 x 24576": merged(512, 24_576),
    "512 x 65536": merged(512, 65_536),
    "512 x 117000": merged(512, 117_000),
    "4 x 100 on 24576": cached(4, 100, 24_576),
    "1 x 100 on 24576": cached(1, 100, 24_576),
    "dense 2048": dense(2_048),
    "dense 8192": dense(8_192),
    "dense 24576": dense(24_576),
    "64 x 80 on 150": cached(64, 80, 150),
    "64 x (150 + 4 x 100)": with_states(64, 150, 4, 100),
    "150 + 16 x 80": with_states(1, 150, 16, 80),
    "150 + 100": with_states(1, 150, 1, 100),
    "1 x 100 on 150": cached(1, 100, 150),
}


def normal(*shape: int) -> Tensor:
    """Standard normal BF16, drawn anew."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Ours:
    """Our kernel on one case."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        rows = max(s.start + s.length for s in segments)
        pool = max(s.own_start + s.length for s in segments)
        self.segments = segments
        self.q = normal(rows, G.heads, G.head_dim)
        self.k_pool, self.v_pool = (normal(pool, G.kv_heads, G.head_dim) for _ in range(2))
        shape = AttentionShape(False, G.heads, G.kv_heads, G.head_dim, torch.bfloat16, self.q.device)
        self.plan = plan_attention(cut_attention(segments, shape), shape)
        self.out = torch.empty_like(self.q)

    def run(self) -> None:
        """One layer's attention."""
        prefix_bidir_attention(self.q, self.k_pool, self.v_pool, self.plan, softmax_scale=SCALE, out=self.out)


def library(batches: Sequence[Batch], backend: SDPBackend) -> Callable[[], None]:
    """The same work as one SDPA call a batch, on tensors laid out as the library likes them."""
    inputs = [
        [
            normal(b.count, heads, n, G.head_dim)
            for heads, n in ((G.heads, b.rows), (G.kv_heads, b.keys), (G.kv_heads, b.keys))
        ]
        for b in batches
    ]

    def run() -> None:
        with sdpa_kernel(backend):
            for query, key, value in inputs:
                F.scaled_dot_product_attention(query, key, value, scale=SCALE, enable_gqa=True)

    return run


def plain(ours: Ours, segment: Segment, rows: slice, dtype: torch.dtype) -> Tensor:
    """softmax(q·k)·v of some rows of a segment in `dtype`."""
    q = ours.q[segment.start : segment.start + segment.length][rows].to(dtype).transpose(0, 1)
    k, v = (
        torch.cat(
            (
                pool[segment.prefix_start : segment.prefix_start + segment.prefix_length],
                pool[segment.own_start : segment.own_start + segment.length],
            )
        )
        .to(dtype)
        .repeat_interleave(G.heads // G.kv_heads, dim=1)
        .transpose(0, 1)
        for pool in (ours.k_pool, ours.v_pool)
    )
    return ((q @ k.transpose(1, 2) * SCALE).softmax(-1) @ v).transpose(0, 1)


def parity(ours: Ours) -> float:
    """Our largest error against FP64 over plain BF16's, at the ends of the first and the last segment."""
    ours.out.fill_(float("nan"))
    ours.run()
    worst = 0.0
    for segment in {ours.segments[0], ours.segments[-1]}:
        for rows in (slice(0, 8), slice(-8, None)):
            expected = plain(ours, segment, rows, torch.float64)
            actual = ours.out[segment.start : segment.start + segment.length][rows]
            error = (actual - expected).abs().max()
            allowed = (plain(ours, segment, rows, torch.bfloat16) - expected).abs().max()
            worst = max(worst, float(error / allowed)) if not error.isnan() else float("inf")
    return worst


def replayed(run: Callable[[], None]) -> tuple[Callable[[], object], int]:
    """(what to time, runs in it): a graph of several runs where one is short."""
    run()
    once = timed_ms(run, repeats=1)
    if once > 5:
        return run, 1
    runs = 10 if once < 1 else 3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(runs):
            run()
    return graph.replay, runs


def measure(case: Case) -> dict[str, float]:
    """Milliseconds of each, parity, and our rate; raises SystemExit when parity fails."""
    ours = Ours(case.segments)
    ratio = parity(ours)
    if not ratio <= 2:
        raise SystemExit(
            f"parity failed: our error is {ratio:.2f} x that of plain BF16; no times are reported"
        )
    timed = {"ours": replayed(ours.run)}
    for name, backend in PEERS.items():
        try:
            timed[name] = replayed(library(case.batches, backend))
        except RuntimeError as error:  # a backend that cannot run the shape
            print(f"{name}: {str(error).splitlines()[0]}")
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, (run, runs) in timed.items():
            times[name].append(timed_ms(run, repeats=3) / runs)
    row = {f"{name}_ms": median(values) for name, values in times.items()}
    flops = sum(4 * b.count * b.rows * b.keys for b in case.batches) * G.heads * G.head_dim
    row |= {"error_over_bf16": ratio, "tflops": flops / row["ours_ms"] / 1e9}
    for name in PEERS:
        if f"{name}_ms" in row:
            row[f"speed_over_{name}"] = row[f"{name}_ms"] / row["ours_ms"]
    return row


def table(rows: dict[str, dict[str, float]]) -> str:
    """GitHub table of all rows."""
    lines = [
        "| rows x keys | ours, us | TFLOP/s | cuDNN, us | flash, us | speed / cuDNN | error / BF16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        peers = " | ".join(
            f"{row[f'{peer}_ms'] * 1e3:,.1f}" if f"{peer}_ms" in row else "-" for peer in PEERS
        )
        ratio = f"{row['speed_over_cudnn']:.2f}" if "speed_over_cudnn" in row else "-"
        lines.append(
            f"| {name} | {row['ours_ms'] * 1e3:,.1f} | {row['tflops']:.0f} | {peers} | {ratio}"
            f" | {row['error_over_bf16']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the asked rows and print, or write, the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", default=",".join(CASES), help="names of CASES, separated by commas")
    parser.add_argument("--out", type=Path, help="folder for kernel.json and kernel.md")
    options = parser.parse_args()
    rows = {name: measure(CASES[name]) for name in options.rows.split(",")}
    device = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "python": platform.python_version(),
    }
    print(device)
    print(table(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "kernel.json").write_text(json.dumps({"device": device, "rows": rows}, indent=1))
        (options.out / "kernel.md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    main()
