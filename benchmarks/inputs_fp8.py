"""FP8 with and without the inputs of linear layers, in one run: few calls, for little device time.

    python benchmarks/inputs_fp8.py [--warm] [--after FILE] [--tiny]

`--warm` compiles what a run needs on four layers, so that another process may do so while this one draws weights.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import torch
from engine import Bench, forget_all
from engine_rows import ROWS, Row
from formats import resident_bytes, say
from geometries import GEOMETRY_27B, GEOMETRY_TINY
from weight_formats import LONG

from d3serve.model.weights import Weights, to_float8

BY_NAME = {row.name: row for row in ROWS}
JOBS = BY_NAME["64 jobs of 150-token states, 4 questions of 100"]
STATE_24K = BY_NAME["24K state, 4 questions of 100"]
ONE = ROWS[0]


def timed(bench: Bench, row: Row, *, warm: int, count: int) -> None:
    """Times of single turns after some that are not counted."""
    runner = bench.engine(rows=row.tokens + 64, slots=row.jobs + 1)
    jobs, times = bench.jobs(row), []
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number in range(warm + count):
        forget_all(runner)
        began = time.perf_counter()
        runner.decide(jobs)
        if number >= warm:
            times.append(1000 * (time.perf_counter() - began))
    rate = 1000 * row.jobs * row.questions / sorted(times)[len(times) // 2]
    peak = torch.cuda.max_memory_allocated() / 1e9 if bench.device.type == "cuda" else 0.0
    say(
        f"   {row.name}: {', '.join(f'{ms:.1f}' for ms in times[:12])} ms; {rate:.1f} questions/s; peak {peak:.1f} GB"
    )
    del runner
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def kinds(weights: Weights) -> dict[str, Weights]:
    """Both formats; they share what they have in common."""
    eight = to_float8(weights)
    return {"fp8-all": to_float8(eight, inputs=True), "fp8": eight}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--after", type=Path, default=None, help="measure once there is such a file")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16
    geometry = GEOMETRY_TINY if options.tiny else GEOMETRY_27B
    if options.warm:
        geometry = dataclasses.replace(geometry, vocab_size=512, layer_types=geometry.layer_types[:4])
    bench = Bench(geometry, device, dtype)
    plain = resident_bytes(bench.weights)
    found = kinds(bench.weights)
    bench.tensors.clear()
    bench.weights = found["fp8-all"]
    if options.warm or options.tiny:
        for weights in found.values():
            bench.weights = weights
            for row in (
                ONE,
                dataclasses.replace(JOBS, jobs=16),
                dataclasses.replace(STATE_24K, state=13_000),
            ):
                small = dataclasses.replace(row, state=min(row.state, 150)) if options.tiny else row
                timed(bench, small, warm=1, count=3)
        return
    while options.after and not options.after.exists():
        time.sleep(0.1)
    for name, weights in found.items():
        say(f"{name}: {resident_bytes(weights) / 1e9:.2f} GB (BF16: {plain / 1e9:.2f} GB)")
    timed(bench, JOBS, warm=3, count=12)
    timed(bench, STATE_24K, warm=1, count=2)
    timed(bench, ONE, warm=4, count=30)
    timed(bench, LONG, warm=0, count=1)
    bench.weights = found["fp8"]
    say("fp8")
    timed(bench, JOBS, warm=1, count=1)
    timed(bench, ONE, warm=4, count=30)
    timed(bench, STATE_24K, warm=0, count=1)


if __name__ == "__main__":
    main()
