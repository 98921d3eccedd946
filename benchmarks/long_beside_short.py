"""Short questions while one long state is read: how long each waits, and what the long one pays.

    python benchmarks/long_beside_short.py --out DIR [--tiny] [--every-ms 100] [--tokens 24576 117000]
    python tools/make_geometry_package.py FOLDER
    python benchmarks/long_beside_short.py --http FOLDER --out DIR

With `--http` a client asks the whole service. Without, it is engine time: token ids in, probabilities out. Each row
reads one long state three times: alone, alone but yielding, and yielding to a short job (a new 150-token state, one
question) that falls due every `--every-ms`. A short job's time counts from the moment when it was due. The long job's
answers must keep every bit.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from beside_over_http import over_http
from engine import Bench, answers
from engine_rows import Row
from geometries import GEOMETRY_27B, GEOMETRY_TINY

from d3serve.model import engine as engine_module
from d3serve.model.capacity import BESIDE_ROWS, BESIDE_SLOTS
from d3serve.model.engine import DecisionEngine, PreparedJob

SHORT = Row("short", 150, 1, 100)
LONG = (24_576, 65_536, 117_000)
TINY = (2_000,)


class Shorts:
    """A short job falls due every `every_s` from the first yield on; each yield answers those that are."""

    def __init__(self, bench: Bench, engine: DecisionEngine, every_s: float) -> None:
        self._bench, self._engine, self._every_s = bench, engine, every_s
        self._due = 0.0
        self.waits_ms: list[float] = []

    def __call__(self, _share: float) -> None:
        """Answer what is due."""
        now = time.perf_counter()
        self._due = self._due or now
        while self._due <= now:
            self._engine.decide(self._bench.jobs(SHORT))
            now = time.perf_counter()
            self.waits_ms.append((now - self._due) * 1000)
            self._due += self._every_s


def timed(engine: DecisionEngine, job: PreparedJob, at_yield: Any) -> tuple[float, torch.Tensor]:
    """Seconds of one reading of the long state, and its probabilities."""
    engine.cache.forget(job.state_key)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    (decided,) = engine.decide([job], at_yield=at_yield)
    seconds = time.perf_counter() - began
    return seconds, torch.tensor(list(decided.answers["q0"].probabilities.values()))


def short_alone_s(bench: Bench, engine: DecisionEngine) -> float:
    """Median time of a short job with the device to itself: launched, captured, then replayed."""
    times = []
    for _ in range(12):
        jobs = bench.jobs(SHORT)
        began = time.perf_counter()
        answers(engine, jobs)
        times.append(time.perf_counter() - began)
    return median(times[4:])


def measure(bench: Bench, tokens: int, every_s: float) -> dict[str, Any]:
    """One row."""
    long = Row("long", tokens, 2, 100)
    rows = max(
        long.state + long.question_tokens + 64, 8 * BESIDE_ROWS
    )  # fewer leave nothing beside a long pass
    engine = bench.engine(rows=rows, slots=4 * BESIDE_SLOTS)
    (job,) = bench.jobs(long)
    short_s = short_alone_s(bench, engine)
    timed(engine, job, None)  # compiles, and plans the library's attention
    alone_s, alone = timed(engine, job, None)
    yields: list[float] = []
    began = time.perf_counter()
    yielding_s, yielding = timed(engine, job, lambda _: yields.append(time.perf_counter() - began))
    shorts = Shorts(bench, engine, every_s)
    disturbed_s, disturbed = timed(engine, job, shorts)
    gaps = [1000 * (b - a) for a, b in pairwise(yields)]
    cuts = quantiles(shorts.waits_ms, n=100) if len(shorts.waits_ms) > 1 else [float("nan")] * 99
    del engine
    return {
        "state_tokens": tokens,
        "alone_s": alone_s,
        "yielding_s": yielding_s,
        "yields": len(yields),
        "longest_gap_ms": max(gaps),
        "disturbed_s": disturbed_s,
        "short_jobs": len(shorts.waits_ms),
        "short_alone_ms": 1000 * short_s,
        "short_p50_ms": cuts[49],
        "short_p99_ms": cuts[98],
        "short_max_ms": max(shorts.waits_ms),
        "price": (disturbed_s - len(shorts.waits_ms) * short_s) / alone_s,
        "equal_bits": bool(torch.equal(alone, yielding) and torch.equal(alone, disturbed)),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--tiny", action="store_true", help="a small geometry, to try the script itself")
    parser.add_argument("--every-ms", type=float, default=100)
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="lengths of the long state")
    parser.add_argument("--http", metavar="FOLDER", default=None, help="measure a service with this package")
    options = parser.parse_args()
    tokens = options.tokens or (TINY if options.tiny else LONG)
    if options.http:
        over_http(options.http, tokens, options.every_ms / 1000, options.out)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.tiny:
        engine_module.LONG_ROWS = 1000
    bench = Bench(
        GEOMETRY_TINY if options.tiny else GEOMETRY_27B,
        device,
        torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    rows = []
    for count in tokens:
        rows.append(measure(bench, count, options.every_ms / 1000))
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "long_beside_short.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
