"""The engine against its floors and against transformers, on the same GPU in one run.

    python benchmarks/engine.py --out DIR [--rows SUBSTRING ...] [--no-peers] [--tiny]

Random BF16 weights at the 27B geometry, made on the device. Parity is checked first: an engine that is wrong gets
no speed. Engine time is token ids in, probabilities out, host work included. A row's floor is the sum of
its parts measured in this run at the row's own token counts (`ceilings.py`).
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, cast

import ceilings
import numpy as np
import parity
import torch
from engine_rows import ROWS, Row
from geometries import GEOMETRY_27B, GEOMETRY_TINY
from peers import Peer

from d3serve.kernels.matrix import Matrix, StackedMatrix
from d3serve.kernels.segments import LongAttention
from d3serve.model.assembly import EngineParts
from d3serve.model.backbone import Backbone, Pools, row_bytes, slot_bytes
from d3serve.model.capacity import BESIDE_ROWS, BESIDE_SLOTS, LONGEST_PASS, MemoryPlan
from d3serve.model.config import CODES, DecisionConfig, Geometry
from d3serve.model.engine import DecidedJob, DecisionEngine, PreparedJob
from d3serve.model.random_weights import random_weights
from d3serve.model.state_cache import StateCache
from d3serve.model.vision import VisionTower
from d3serve.model.weights import Layer, Weights
from d3serve.schemas import ModelInfo
from d3serve.schemas.questions import ChoiceQuestion, Question

LONG_STATES = "long states"  # names the comparison of cached with read ones among the rows
LONG_PASS = 40_000  # tokens from which one run takes seconds, and the peers several times that
QUESTION: Question = ChoiceQuestion(type="choice", criteria={str(i): None for i in range(parity.OPTIONS)})


class Bench:
    """One set of weights, the engine and the peer on it, and the measurements."""

    tower: VisionTower | None = None  # of a bench whose states show media
    long_attention: LongAttention = "ours"

    def __init__(self, geometry: Geometry, device: torch.device, dtype: torch.dtype) -> None:
        """Draw the weights on the device."""
        self.geometry, self.device, self.dtype = geometry, device, dtype
        self.weights, self.tensors = random_weights(geometry, device, dtype)
        self._random = np.random.default_rng(0)

    @cached_property
    def peer(self) -> Peer:
        """Transformers on the same numbers, vectors in FP32 as ours are; it holds them from then on."""
        return Peer(self.geometry, self.tensors, self.weights.readout)

    @cached_property
    def loaded_peer(self) -> Peer:
        """Transformers all in BF16, as it loads a package: norms, gates and taps too."""
        narrow = {name: tensor.to(self.dtype) for name, tensor in self.tensors.items()}
        return Peer(self.geometry, narrow, self.weights.readout)

    def engine(self, *, rows: int, slots: int) -> DecisionEngine:
        """An engine whose longest pass has `rows` keys and `slots` states; beside it is room for a short one."""
        return self.planned(MemoryPlan(rows + BESIDE_ROWS, slots + BESIDE_SLOTS, LONGEST_PASS))

    def planned(self, plan: MemoryPlan) -> DecisionEngine:
        """An engine with pools and passes of a plan."""
        g, rows, slots = self.geometry, plan.rows, plan.slots
        cache = StateCache(
            rows=rows, slots=slots, row_bytes=row_bytes(g, self.dtype), slot_bytes=slot_bytes(g, self.dtype)
        )
        pools = Pools.allocate(g, rows=rows, slots=slots, device=self.device, dtype=self.dtype)
        codes = tuple(map(str, range(CODES)))
        config = DecisionConfig("prefix_bidir", 1.0, codes, tuple(range(CODES)), None, None, None, ())
        info = ModelInfo(
            name="random", attention_mode="prefix_bidir", validated_length=g.max_positions,
            max_length=g.max_positions, dtype=str(self.dtype), device=str(self.device),
        )  # fmt: skip
        return DecisionEngine(
            EngineParts(
                info=info, config=config, format=cast("Any", None),
                backbone=Backbone(
                    g, self.weights, pools, mlp_rows=plan.mlp_rows, tower=self.tower, long_attention=self.long_attention
                ),
                cache=cache,
                plan=plan,
            )
        )  # fmt: skip

    def reseed(self) -> None:
        """Draw the same tokens again."""
        self._random = np.random.default_rng(0)

    def tokens(self, length: int) -> np.ndarray:
        """Random token ids."""
        return self._random.integers(0, self.geometry.vocab_size, length)

    def jobs(self, row: Row) -> list[PreparedJob]:
        """The jobs of a row, over fresh states."""
        return [
            PreparedJob(
                self._random.bytes(16).hex(),
                self.tokens(row.state),
                {f"q{i}": QUESTION for i in range(row.questions)},
                tuple(self.tokens(row.question) for _ in range(row.questions)),
            )
            for _ in range(row.jobs)
        ]

    def on_device(self, ids: np.ndarray) -> torch.Tensor:
        """Token ids as a tensor."""
        return torch.from_numpy(ids).to(self.device)


def answers(engine: DecisionEngine, jobs: Sequence[PreparedJob]) -> torch.Tensor:
    """Probabilities [questions, options] of all jobs."""
    return as_tensor(engine.decide(jobs))


def as_tensor(decided: Sequence[DecidedJob]) -> torch.Tensor:
    """Probabilities [questions, options] of decided jobs."""
    return torch.tensor(
        [
            list(cast("Any", answer).probabilities.values())
            for job in decided
            for answer in job.answers.values()
        ]
    )


def forget_all(engine: DecisionEngine) -> None:
    """Empty the state cache."""
    for key in engine.cached_state_keys():
        engine.cache.forget(key)


def engine_ms(bench: Bench, engine: DecisionEngine, row: Row) -> tuple[float, torch.Tensor]:
    """Median time of a turn, token ids to probabilities on the host, and its probabilities."""
    jobs = bench.jobs(row)
    for _ in range(
        3 if row.tokens < LONG_PASS else 1
    ):  # compilation, capture and, for a cached row, the state
        answers(engine, jobs)
        if not row.cached:
            forget_all(engine)
    times = []
    for _ in range(ceilings.repeats_for(row.tokens)):
        if not row.cached:
            forget_all(engine)
        synchronize(bench.device)
        began = time.perf_counter()
        decided = engine.decide(jobs)
        times.append((time.perf_counter() - began) * 1000)
    first = as_tensor(decided)
    return median(times), torch.stack((first, answers(engine, jobs)))


def peer_ms(bench: Bench, row: Row, run: Callable[[torch.Tensor, list[torch.Tensor]], object]) -> float:
    """Median time of transformers on the first job of the row."""
    state = bench.on_device(bench.tokens(row.state))
    questions = [bench.on_device(bench.tokens(row.question)) for _ in range(row.questions)]
    times = []
    for _ in range(2 if row.state > ceilings.LONG else 4):  # the first compiles and tunes
        synchronize(bench.device)
        began = time.perf_counter()
        run(state, questions)
        synchronize(bench.device)
        times.append((time.perf_counter() - began) * 1000)
    return median(times[1:])


def peers_ms(bench: Bench, row: Row) -> dict[str, float]:
    """Transformers on a row: the state once, and where that does not take minutes, a prompt a question."""
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = {"state_once_ms": peer_ms(bench, row, bench.loaded_peer.state_once)}
    if row.state < ceilings.LONG:
        times["one_by_one_ms"] = peer_ms(bench, row, bench.loaded_peer.whole_prompts)
        times["one_batch_ms"] = peer_ms(bench, row, bench.loaded_peer.whole_prompts_batched)
    if bench.device.type == "cuda":
        times["peer_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return times


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it is one that works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def kernel_times(bench: Bench, engine: DecisionEngine, row: Row, most: int = 14) -> list[str]:
    """Device time by kernel of one turn, largest first."""
    jobs = bench.jobs(row)
    for _ in range(2):
        engine.decide(jobs)
        if not row.cached:
            forget_all(engine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.decide(jobs)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    return [
        f"{row.name}: {total / 1000:.2f} ms on the device",
        *(f"{e.self_device_time_total / 1000:11.3f} ms {e.count:5d} x  {e.key[:90]}" for e in events[:most]),
    ]


def floor_ms(row: Row, weights: Weights, geometry: Geometry) -> dict[str, float]:
    """The parts of a row's floor, and their sum."""
    matrices = [m for layer in weights.layers for m in matrices_of(layer)]
    states = 0.0 if row.cached else row.jobs * ceilings.attention_ms(geometry, row.state, row.state)
    rows, keys = row.questions * row.question, row.state + row.question
    attention = states + row.jobs * ceilings.attention_ms(geometry, rows, keys)
    parts = {
        "gemm": ceilings.gemms_ms(matrices, row.tokens),
        "attention": geometry.full_layers * attention,
        "delta": geometry.linear_layers * ceilings.delta_rule_ms(geometry, row.states, row.question_lengths),
    }
    return {**parts, "floor": sum(parts.values())}


def matrices_of(layer: Layer) -> list[Matrix]:
    """The matrices that one layer multiplies with, each part of a stack for itself."""
    first = layer.first.parts if isinstance(layer.first, StackedMatrix) else (layer.first,)
    return [*first, layer.mixer.out, layer.gate_up, layer.down]


def check(bench: Bench) -> list[str]:
    """Parity lines; raises SystemExit when the engine is wrong."""
    engine = bench.engine(rows=8192, slots=16)
    (job,) = bench.jobs(Row("parity", 150, 6, 100))
    ours = answers(engine, [job])
    found = parity.compare(
        bench.peer, bench.on_device(job.state), [bench.on_device(b) for b in job.blocks], ours
    )
    cached = answers(engine, [job])
    forget_all(engine)
    company = answers(engine, [job, *bench.jobs(Row("company", 150, 8, 60, jobs=8))])[: len(ours)]
    lines = [
        f"{found}; spread of p {float(ours.std()):.3f}",
        f"cached against read: max |dp| {float((cached - ours).abs().max()):.5f}",
        f"alone against 64 other questions: max |dp| {float((company - ours).abs().max()):.5f}",
    ]
    drift = max(float((cached - ours).abs().max()), float((company - ours).abs().max()))
    if not found.holds or drift > found.bound:
        raise SystemExit("parity does not hold, so nothing is timed:\n" + "\n".join(lines))
    return lines


def cached_against_read(row: Row, both: torch.Tensor) -> str:
    """What changes when the same questions meet the state in the cache."""
    first, second = both
    changed = parity.changed_decisions(second, first)
    flipped = int((first.argmax(-1) != second.argmax(-1)).sum())
    return (
        f"{row.state} x {row.questions}: cached against read, max |dp| {float((first - second).abs().max()):.5f}, "
        f"decisions changed {changed} beyond a margin of {parity.MARGIN} ({flipped} in all)"
    )


def long_states(bench: Bench) -> list[str]:
    """States of 30K and 60K tokens: 1, 4, 16 and 64 questions on the cached state against 64 asked as it was read."""
    lines = []
    for tokens in (30_000, 60_000):
        engine = bench.engine(rows=tokens + 7_000, slots=2)
        (job,) = bench.jobs(Row("long", tokens, 64, 100))
        read = answers(engine, [job])
        for count in (1, 4, 16, 64):
            names = dict(list(job.by_name.items())[:count])
            again = answers(engine, [PreparedJob(job.state_key, job.state, names, job.blocks[:count])])
            changed = parity.changed_decisions(again, read[:count])
            worst = float((again - read[:count]).abs().max())
            lines.append(f"{tokens} x {count}: decisions changed {changed}, max |dp| {worst:.5f}")
        del engine
        torch.cuda.empty_cache()
    return lines


def measure(bench: Bench, row: Row, *, peers: bool, profile: bool, floors: bool) -> dict[str, Any]:
    """One row: ours, the floor's parts, the peers."""
    began = time.perf_counter()
    total = row.jobs * row.state + row.question_tokens
    engine = bench.engine(rows=total + 64, slots=row.jobs + 1)
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, Any] = {"row": row.name, "tokens": row.tokens, "questions": row.jobs * row.questions}
    result["ours_ms"], both = engine_ms(bench, engine, row)
    if on_gpu:
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if not row.cached:
        result["cached_against_read"] = cached_against_read(row, both)
    if profile:
        result["kernels"] = kernel_times(bench, engine, row)
        print("\n".join(result["kernels"]), flush=True)
    del engine
    if on_gpu:
        torch.cuda.empty_cache()
    if floors:
        result |= floor_ms(row, bench.weights, bench.geometry)
    if peers and row.jobs == 1 and not row.cached:
        result |= peers_ms(bench, row)
    return {**result, "measured_in_s": time.perf_counter() - began}


HEAD = (
    "request", "ours ms", "floor ms (gemm + attention + delta)", "ours ÷ floor",
    "transformers, best ms", "÷ ours", "peak GB",
)  # fmt: skip


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as markdown."""
    return "\n".join(map(_line, (HEAD, ["---"] * len(HEAD), *map(_cells, results))))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(r: dict[str, Any]) -> list[str]:
    ours = r["ours_ms"]
    floor, ratio, best, gain = "–", "–", "–", "–"
    if "floor" in r:
        floor = f"{r['floor']:.1f} ({r['gemm']:.1f} + {r['attention']:.1f} + {r['delta']:.1f})"
        ratio = f"{ours / r['floor']:.2f}"
    if peers := [r[name] for name in ("state_once_ms", "one_by_one_ms", "one_batch_ms") if name in r]:
        best, gain = f"{min(peers):.0f}", f"{min(peers) / ours:.1f}"
    return [r["row"], f"{ours:.1f}", floor, ratio, best, gain, f"{r.get('peak_gb', 0):.1f}"]


def main() -> None:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rows", nargs="*", default=None, help="only rows whose name contains one of these")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-floors", action="store_true")
    parser.add_argument("--profile", action="store_true", help="device time by kernel of each row")
    parser.add_argument("--tiny", action="store_true", help="a small geometry, to try the script itself")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    bench = Bench(
        GEOMETRY_TINY if options.tiny else GEOMETRY_27B, device, torch.bfloat16 if on_gpu else torch.float32
    )
    floors = on_gpu and not options.no_floors and not options.tiny
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor(),
        "torch": torch.__version__,
        "parity": check(bench),
    }
    print("\n".join(report["parity"]), flush=True)
    if floors:
        report["copy_tb_s"] = ceilings.copy_tb_s()
        print(f"device copy {report['copy_tb_s']:.2f} TB/s", flush=True)
    if on_gpu and not options.tiny and (not options.rows or LONG_STATES in options.rows):
        report["long_states"] = long_states(bench)
        print("\n".join(report["long_states"]), flush=True)
    results: list[dict[str, Any]] = report.setdefault("rows", [])
    for row in ROWS:
        if options.rows and not any(part in row.name for part in options.rows):
            continue
        peers, profile = not options.no_peers, options.profile and on_gpu
        results.append(measure(bench, row, peers=peers, profile=profile, floors=floors))
        print(json.dumps({k: v for k, v in results[-1].items() if k != "kernels"}), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "engine.json").write_text(json.dumps(report, indent=1))
    print(table(results))
    if options.out:
        (options.out / "engine.md").write_text(table(results) + "\n")


if __name__ == "__main__":
    main()
