"""Where a small pass's time goes, and whether other kernels would give its products more.

    python benchmarks/small_passes.py timeline|pauses|library|few [--float8] [--tiny]

`timeline` tells apart what one question waits for: the host, kernels, gaps between them. `pauses` asks it again and
again, with pauses: what a card gives that is not hot. `library` times, for each product of a layer, what cuBLASLt
proposes without split sums beside what PyTorch takes, and compares bits; then all products of a pass, with PyTorch's
choices and with the fastest of those. `few` times products of few rows and of few columns, ours beside the library's.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ceilings import in_graph, timed_ms
from cublaslt import Algorithm, Library, Product
from engine import Bench, answers, forget_all
from engine_rows import ROWS, Row
from geometries import GEOMETRY_27B, GEOMETRY_TINY

from d3serve.kernels.float8 import quantize_activations
from d3serve.kernels.matrix import Float8Matrix, Matrix, Rows, quantize_rows, sum_rows_alike
from d3serve.kernels.operations import linear
from d3serve.model import engine as served
from d3serve.model.engine import DecisionEngine, PreparedJob

SHAPES = {
    "gate_up": (34_816, 5120),
    "down": (5120, 17_408),
    "inputs": (16_480, 5120),
    "out": (5120, 6144),
    "qkv": (14_336, 5120),
}
GATES = 96  # rows of the weight that stays plain beside FP8 inputs
ROW_COUNTS = (256, 576)  # one question and four, as they are padded
FEW = (1, 2, 4, 8, 16, 32, 64, 128)
MANY = (32, 128, 256, 576, 1024, 2048, 5270, 24_976)
PAUSES_S = ((0.0, 100), (0.02, 60), (0.1, 30), (0.3, 15))
ROTATED_BYTES = 400 * 2**20  # weights come from memory, as in a pass
AMONG = 4096  # rows, to compare bits with
MUCH = 0.98  # of PyTorch's time: what is no faster than that is noise


def drawn(rows: int, columns: int, *, float8: bool) -> Matrix:
    """A weight."""
    weight = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") / columns**0.5
    return Float8Matrix(*quantize_rows(weight)) if float8 else weight


def inputs(rows: int, columns: int, *, float8: bool) -> Rows:
    """Activations."""
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    return quantize_activations(x) if float8 else x


def rotated_us(run: Callable[[Any], object], weights: list[Matrix]) -> float:
    """Microseconds of one launch, over weights in turn, in a graph."""
    return (
        1000
        * timed_ms(in_graph(lambda: [run(each) for each in weights]), repeats=10, warmup=2)
        / len(weights)
    )


def fastest(library: Library, name: str, rows: int, *, float8: bool) -> Algorithm | None:
    """The fastest of what the library proposes, if that is faster than what PyTorch takes and has its bits."""
    N, K = SHAPES[name]
    copies = max(2, min(8, ROTATED_BYTES // (N * K)))
    weights = [drawn(N, K, float8=float8) for _ in range(copies)]
    many, out = inputs(AMONG, K, float8=float8), torch.empty(rows, N, dtype=torch.bfloat16, device="cuda")
    x, wanted, product = (
        many[:rows],
        linear(many, weights[0])[:rows],
        Product(library, rows, N, K, float8=float8),
    )
    pytorch_us, tried = rotated_us(lambda weight: linear(x, weight, out), weights), []
    for algorithm in product.proposed():
        out.fill_(7.0)
        product.run(algorithm, x, weights[0], out)
        same = torch.equal(out, wanted)
        us = rotated_us(lambda weight, it=algorithm: product.run(it, x, weight, out), weights)
        tried.append((us, same, algorithm))
    tried.sort(key=lambda each: each[0])
    shown = ", ".join(f"{us:.1f}{'' if same else ' (OTHER BITS)'}" for us, same, _ in tried)
    rate, same = 2e-6 * rows * N * K / pytorch_us, torch.equal(linear(x, weights[0]), wanted)
    print(
        f"{name} of {rows} rows: PyTorch {pytorch_us:.1f} us ({rate:.0f} TFLOP/s, bits as among others: {same})"
    )
    print(f"   proposed: {shown} us", flush=True)
    return next((it for us, same, it in tried if same and us < MUCH * pytorch_us), None)


def compare_library(*, float8: bool) -> None:
    """Each product alone, then all of a pass."""
    library = Library()
    for rows in ROW_COUNTS:
        chosen = {name: fastest(library, name, rows, float8=float8) for name in SHAPES}
        replay_all(library, rows, {name: it for name, it in chosen.items() if it is not None}, float8=float8)
        torch.cuda.empty_cache()


def replay_all(library: Library, rows: int, chosen: dict[str, Algorithm], *, float8: bool) -> None:
    """All products of a pass in one graph, as PyTorch would and with what was chosen."""
    order = [name for layer in range(64) for name in (first_of(layer), "out", "gate_up", "down")]
    weights = [(name, drawn(*SHAPES[name], float8=float8)) for name in order]
    x = {K: inputs(rows, K, float8=float8) for _, K in SHAPES.values()}
    outs = {N: torch.empty(rows, N, dtype=torch.bfloat16, device="cuda") for N, _ in SHAPES.values()}
    products = {name: Product(library, rows, *SHAPES[name], float8=float8) for name in chosen}

    def run(choice: dict[str, Algorithm]) -> None:
        for name, weight in weights:
            N, K = SHAPES[name]
            if name in choice:
                products[name].run(choice[name], x[K], weight, outs[N])
            else:
                linear(x[K], weight, outs[N])

    graphs = {"PyTorch": in_graph(lambda: run({})), "chosen": in_graph(lambda: run(chosen))}
    for _ in range(3):  # in turn, since a hot card is slower
        times = {name: f"{timed_ms(replay, repeats=10, warmup=2):.2f}" for name, replay in graphs.items()}
        print(f"all products of {rows} rows, ms: {times}; others for {[*chosen]}", flush=True)


def first_of(layer: int) -> str:
    """The first product of a layer."""
    return "qkv" if layer % 4 == 3 else "inputs"


def compare_few() -> None:
    """Products of few rows, and of few columns by the library and by ours."""
    from d3serve.kernels import narrow

    for float8 in (False, True):
        for name, shape in SHAPES.items():
            weights = [drawn(*shape, float8=float8) for _ in range(2)]
            line = []
            for rows in FEW:
                x = inputs(rows, shape[1], float8=float8)
                line.append(f"{rows}: {rotated_us(lambda weight, x=x: linear(x, weight), weights):.0f}")
            print(f"{'FP8' if float8 else 'BF16'} {name}, us by rows: {', '.join(line)}", flush=True)
    weights = [drawn(GATES, 5120, float8=False) for _ in range(16)]
    x, out = torch.randn(MANY[-1], 5120, dtype=torch.bfloat16, device="cuda"), []
    for kind in ("the library", "ours"):
        line = []
        for rows in MANY:
            out.append(torch.empty(rows, GATES, dtype=torch.bfloat16, device="cuda"))
            run = linear if kind == "the library" else narrow.narrow_linear
            line.append(
                f"{rows}: {rotated_us(lambda w, run=run, rows=rows: run(x[:rows], w, out[-1]), weights):.1f}"
            )
        print(f"gates by {kind}, us by rows: {', '.join(line)}", flush=True)
    alike = [torch.equal(each, out[-1][: len(each)]) for each in out[len(MANY) :]]
    print(f"rows of ours have the same bits among any others: {all(alike)}", flush=True)


def replayed(bench: Bench, row: Row) -> tuple[DecisionEngine, list[PreparedJob]]:
    """An engine that has a graph for a row's jobs."""
    runner, jobs = bench.engine(rows=2048, slots=4), bench.jobs(row)
    for _ in range(4):
        answers(runner, jobs)
        forget_all(runner)
    torch.cuda.synchronize()
    return runner, jobs


@contextmanager
def marked(names: tuple[str, ...], marks: dict[str, list[float]]) -> Iterator[None]:
    """Note when an engine calls these functions and when they return."""
    kept = {name: getattr(served, name) for name in names}

    def timed(name: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            marks.setdefault(f"{name} begins", []).append(time.perf_counter())
            result = kept[name](*arguments, **options)
            marks.setdefault(f"{name} ends", []).append(time.perf_counter())
            return result

        return run

    for name in names:
        setattr(served, name, timed(name))
    yield
    for name, function in kept.items():
        setattr(served, name, function)


def device_events(run: Callable[[], object]) -> list[tuple[float, float, str]]:
    """(begin, duration, name) of all that a call does on the device, microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return sorted((each["ts"], each["dur"], each["name"]) for each in events if each.get("cat") in kinds)


def timeline(bench: Bench, row: Row) -> None:
    """What a question waits for."""
    runner, jobs = replayed(bench, row)
    marks: dict[str, list[float]] = {}
    began, walls = [], []
    with marked(("plan_rows", "read_probabilities"), marks):
        for _ in range(20):
            forget_all(runner)
            torch.cuda.synchronize()
            began.append(time.perf_counter())
            runner.decide(jobs)
            walls.append(1000 * (time.perf_counter() - began[-1]))
    steps = {
        name: f"{1000 * median(at - start for at, start in zip(times, began, strict=True)):.2f}"
        for name, times in marks.items()
    }
    print(f"{row.name}: {median(walls):.2f} ms; the host, ms after it began: {steps}")
    forget_all(runner)
    events = device_events(lambda: runner.decide(jobs))
    busy, span = sum(each[1] for each in events), events[-1][0] + events[-1][1] - events[0][0]
    print(f"   device: {len(events)} events, busy {busy / 1000:.2f} ms of {span / 1000:.2f}")
    gaps = sorted(
        ((after[0] - each[0] - each[1], each[2][:50], after[2][:50]) for each, after in pairwise(events)),
        reverse=True,
    )
    print("   longest gaps, us:", [(round(gap, 1), *names) for gap, *names in gaps[:6]])
    spent: dict[str, list[float]] = {}
    for _, duration, name in events:
        spent.setdefault(name, []).append(duration)
    for name, each in sorted(spent.items(), key=lambda item: -sum(item[1]))[:20]:
        print(
            f"   {sum(each) / 1000:8.3f} ms {len(each):4d} x {median(each):8.2f} us  {name[:100]}", flush=True
        )


def pauses(bench: Bench, row: Row) -> None:
    """The same question again and again."""
    runner, jobs = replayed(bench, row)
    for pause_s, count in PAUSES_S:
        walls, clocks = [], []
        for _ in range(count):
            forget_all(runner)
            torch.cuda.synchronize()
            time.sleep(pause_s)
            began = time.perf_counter()
            runner.decide(jobs)
            walls.append(1000 * (time.perf_counter() - began))
            clocks.append(torch.cuda.clock_rate())
        late = sorted(walls[count // 3 :])
        print(
            f"{row.name}, pauses of {1000 * pause_s:.0f} ms: median {median(late):.2f} ms, least {late[0]:.2f}; "
            f"{median(clocks):.0f} MHz just after", flush=True,
        )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("timeline", "pauses", "library", "few"))
    parser.add_argument("--float8", action="store_true", help="of `library`: FP8 products")
    parser.add_argument("--tiny", action="store_true", help="a small geometry, to try the script itself")
    options = parser.parse_args()
    sum_rows_alike()
    torch.manual_seed(0)
    if options.what == "library":
        compare_library(float8=options.float8)
    elif options.what == "few":
        compare_few()
    else:
        bench = Bench(GEOMETRY_TINY if options.tiny else GEOMETRY_27B, torch.device("cuda"), torch.bfloat16)
        for row in ROWS[:2]:
            (timeline if options.what == "timeline" else pauses)(bench, row)


if __name__ == "__main__":
    main()
