"""Attention of long states: cuDNN's and our kernel, FlashAttention-3 in BF16, and that in E4M3.

    python benchmarks/long_attention.py --out DIR [--parts PART ...] [--lengths N ...] [--tiny]

Random BF16 weights at the 27B geometry. Parts, in the order of `--parts`:

    layers     time and error of one layer over keys that are normed and turned, by length; and the error of one
               whose keys and values alone are rounded to E4M3, as a cache might keep them
    split      the reference of `fidelity`, whose products are split (`split_products.py`), against plain FP32
    fidelity   1,000 questions on states of 64K, 24K and 117K, against FP32 and against cuDNN's and our kernel in
               BF16; and the same asked again with K and V of the state in the cache rounded to E4M3 and back
    passes     time of a turn, and whether a state in the cache gives the answers that it gave as it was read
    quantized  the same with FP8 weights
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import get_args

import parity
import torch
from ceilings import timed_ms
from engine import Bench, answers, forget_all, synchronize
from engine_rows import Row
from exact import exact, kept
from fidelity import Report, free_memory
from geometries import GEOMETRY_27B, GEOMETRY_TINY
from split_products import split_linear
from torch import Tensor

from d3serve.kernels.attention_tiles import FLASH3_ROWS, FLOAT8_ROWS
from d3serve.kernels.matrix import quantize_rows
from d3serve.kernels.prefix_bidir import cut_attention, plan_attention, prefix_bidir_attention
from d3serve.kernels.segments import AttentionShape, LongAttention, Segment
from d3serve.model.engine import DecisionEngine
from d3serve.model.passes import PreparedJob
from d3serve.model.weights import to_float8

G = GEOMETRY_27B
SCALE = G.head_dim**-0.5
ROUTES: tuple[LongAttention, ...] = get_args(LongAttention)
BF16 = ROUTES[0]
KEPT = "K and V in E4M3"
LENGTHS = (2048, 4096, 8192, 16_384, 24_576, FLOAT8_ROWS.start - 1, FLOAT8_ROWS.start, 65_536, 117_000)
SAMPLED = 256  # rows of a layer that are compared with FP32
MARGIN = 0.05
FP32_S = 60, 1 / 800  # that an FP32 pass may take at most, and for each row of the state
SPLIT = Row("4K", 4_000, 64, 40)
FIDELITY = (Row("64K", 65_536, 300, 40), Row("24K", 24_000, 400, 40), Row("117K", 117_000, 300, 40))
PASSES = (Row("24K x 4", 24_576, 4, 100), Row("64K x 2", 65_536, 2, 100), Row("117K x 2", 117_000, 2, 100))
PARTS = ("layers", "split", "fidelity", "passes", "quantized")


def normed(T: int, heads: int) -> Tensor:
    """Rows as a layer makes them: normed, and turned by their positions on the first quarter of the lanes."""
    x = torch.randn(T, heads, G.head_dim, device="cuda")
    x *= torch.rsqrt(x.square().mean(-1, keepdim=True))
    half = G.rotary_dim // 2
    frequencies = G.rope_theta ** -(torch.arange(half, device="cuda") / half)
    angles = (torch.arange(T, device="cuda")[:, None] * frequencies)[:, None]
    a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
    x[..., :half], x[..., half : 2 * half] = (
        a * angles.cos() - b * angles.sin(),
        b * angles.cos() + a * angles.sin(),
    )
    return x.bfloat16()


def drawn(T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one layer."""
    values = torch.randn(T, G.kv_heads, G.head_dim, device="cuda", dtype=torch.bfloat16)
    return normed(T, G.heads), normed(T, G.kv_heads), values


def attended(route: LongAttention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Callable[[], object]:
    """One layer as a pass runs it."""
    segments = [Segment(0, len(q), 0)]
    shape = AttentionShape(False, G.heads, G.kv_heads, G.head_dim, q.dtype, q.device, route)
    plan = plan_attention(cut_attention(segments, shape), shape)
    return lambda: prefix_bidir_attention(q, k, v, plan, softmax_scale=SCALE, out=out)


def attended_exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What some rows attend to, in FP32."""
    group, heads = G.heads // G.kv_heads, []
    for head in range(G.heads):
        keys, values = k[:, head // group].float(), v[:, head // group].float()
        heads.append((q[:, head].float() @ keys.T * SCALE).softmax(-1) @ values)
    return torch.stack(heads, 1)


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, of all rows together."""
    return float((found.float() - wanted).norm() / wanted.norm())


def in_float8(x: Tensor) -> Tensor:
    """X [T, HK, D] as an E4M3 cache would give it back: a scale a head, about the head's mean row."""
    mean = x.float().mean(0)
    values, scale = quantize_rows((x.float() - mean).transpose(0, 1).flatten(1))
    return (values.float() * scale).unflatten(1, (len(x), -1)).transpose(0, 1) + mean


def layers(report: Report, lengths: list[int]) -> None:
    """Each route takes its turn, three times."""
    for T in lengths:
        q, k, v = drawn(T)
        outs = {route: torch.empty_like(q) for route in ROUTES}
        runs = {route: attended(route, q, k, v, outs[route]) for route in ROUTES}
        times: dict[str, list[float]] = {route: [] for route in ROUTES}
        for _ in range(3):
            for route, run in runs.items():
                times[route].append(timed_ms(run, repeats=3 if T < 40_000 else 1, warmup=T < 40_000))
        rows = torch.randint(0, T, (SAMPLED,), device="cuda")
        wanted = attended_exactly(q[rows], k, v)
        for route in ROUTES:
            ms = median(times[route])
            rate = 4e-9 * G.heads * G.head_dim * T**2 / ms
            figures = {"ms": ms, "tflops": rate, "error": error(outs[route][rows], wanted)}
            report.add("layers", f"{T} {route}", figures)
        rounded = attended_exactly(q[rows], in_float8(k), in_float8(v))
        report.add("layers", f"{T} {KEPT}", {"error": error(rounded, wanted)})
        del q, k, v, outs, runs
        free_memory()


def turn(
    bench: Bench, row: Row, route: LongAttention, jobs: Sequence[PreparedJob]
) -> tuple[float, Tensor, DecisionEngine]:
    """Seconds of a turn after a short one, its answers, and the engine that has the state in its cache."""
    bench.long_attention = route
    runner = bench.engine(rows=row.tokens + 64, slots=2)
    answers(runner, bench.jobs(Row("warm-up", min(row.state, FLASH3_ROWS.start), 2, 100)))
    forget_all(runner)
    synchronize(bench.device)
    began = time.perf_counter()
    found = answers(runner, jobs)
    return time.perf_counter() - began, found, runner


def split(bench: Bench, report: Report, row: Row) -> None:
    """Split products against FP64, plain FP32 and BF16 beside them; and answers of theirs against plain FP32's."""
    weight = bench.weights.layers[0].gate_up
    if isinstance(weight, Tensor):
        rows = torch.randn(SAMPLED, weight.shape[1], device=bench.device)
        wanted = (rows.double() @ weight.double().T).float()
        products = {
            "split": split_linear(rows, weight),
            "FP32": rows @ weight.float().T,
            "BF16": rows.bfloat16() @ weight.T,
        }
        report.add("split", "a product", {name: error(found, wanted) for name, found in products.items()})
    bench.reseed()
    jobs, began = bench.jobs(row), time.perf_counter()
    found = exact(bench, jobs, split=True)
    middle = time.perf_counter()
    wanted = exact(bench, jobs)
    seconds = {"seconds": middle - began, "FP32's seconds": time.perf_counter() - middle}
    report.add(
        "split", row.name, parity.errors(found, wanted) | {"rms": parity.rms(found - wanted)} | seconds
    )
    free_memory()


def fidelity(bench: Bench, report: Report, row: Row, routes: Sequence[LongAttention]) -> None:
    """Answers by each route against FP32, if there is time for it, and against those of the routes before it."""
    bench.reseed()
    jobs, began = bench.jobs(row), time.perf_counter()
    references: dict[str, Tensor] = {}
    if report.left > FP32_S[0] + FP32_S[1] * row.state:
        file = report.references and report.references / f"FP32, {row.name}.pt"
        references["FP32"] = kept(file, lambda: exact(bench, jobs, split=True))
        report.say(f"{row.name}: FP32 in {time.perf_counter() - began:.1f} s")
        free_memory()
    for route in routes:
        took, found, runner = turn(bench, row, route, jobs)
        report.say(f"{row.name} {route}: {took:.3f} s")
        against(report, f"{row.name} {route}", found, references)
        references[route] = found
        if route == BF16:
            round_cached(runner, jobs)
            against(report, f"{row.name} {route}, {KEPT}", answers(runner, jobs), references)
        del runner
        free_memory()


def against(report: Report, name: str, found: Tensor, references: dict[str, Tensor]) -> None:
    """Answers against each reference."""
    for reference, wanted in references.items():
        figures = parity.errors(found, wanted) | {"spread": float(wanted.std())}
        figures["changed beyond 0.05"] = sum(each > MARGIN for each in figures["their margins"])
        figures["every bit"] = torch.equal(found, wanted)
        report.add("fidelity", f"{name} against {reference}", figures)


def round_cached(runner: DecisionEngine, jobs: Sequence[PreparedJob]) -> None:
    """Leave of K and V of cached states what E4M3 keeps: the pools stay BF16, whose rounding is a hundredth of that."""
    for job in jobs:
        entry = runner.cache.acquire(job.state_key)
        if entry is None:
            raise RuntimeError("the state is not in the cache")
        for pool in (runner.backbone.pools.k, runner.backbone.pools.v):
            for layer in pool:
                rows = layer[entry.start : entry.start + entry.length]
                rows.copy_(in_float8(rows))
        runner.cache.release(entry)


def passes(
    bench: Bench, report: Report, part: str, rows: Sequence[Row], routes: Sequence[LongAttention]
) -> None:
    """Each route's time of a turn."""
    for row in rows:
        bench.reseed()
        jobs = bench.jobs(row)
        for route in routes:
            took, read, runner = turn(bench, row, route, jobs)
            figures = {"seconds": took, "cached equals read": torch.equal(read, answers(runner, jobs))}
            report.add(part, f"{row.name} {route}", figures)
            del runner
            free_memory()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--routes", nargs="*", default=ROUTES, choices=ROUTES, help="of fidelity and passes")
    parser.add_argument("--rows", nargs="*", default=[""], help="of these, what has such a part in its name")
    parser.add_argument("--references", type=Path, default=None, help="a folder where FP32 answers are kept")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="FP32 is left out where they would not do"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a small geometry on a CPU, to try the script itself"
    )
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    head = {"device": torch.cuda.get_device_name() if on_gpu else "CPU", "torch": torch.__version__}
    report = Report(options.out, options.seconds, head, options.references)
    if "layers" in options.parts:
        layers(report, list(options.lengths))
    of_passes = [part for part in options.parts if part in PARTS[1:]]
    if not of_passes:
        return
    device, routes = torch.device("cuda" if on_gpu else "cpu"), tuple(options.routes)
    bench = Bench(GEOMETRY_TINY if options.tiny else G, device, torch.bfloat16)

    def sized(row: Row) -> Row:
        return Row(row.name, row.state // 100, 4, 8) if options.tiny else row

    def chosen(rows: tuple[Row, ...]) -> list[Row]:
        return [sized(row) for row in rows if any(each in row.name for each in options.rows)]

    for part in of_passes:
        if part == "fidelity":
            for row in chosen(FIDELITY):
                fidelity(bench, report, row, routes)
        elif part == "split":
            split(bench, report, sized(SPLIT))
        else:
            if part == "quantized":
                bench.weights = to_float8(bench.weights)
                free_memory()
            passes(bench, report, part, chosen(PASSES), routes)


if __name__ == "__main__":
    main()
