"""How far answers are from FP32: ours, transformers', and what each rounding of a BF16 pass adds.

    python benchmarks/fidelity.py --out DIR [--parts PART ...] [--seconds S] [--tiny]

Random BF16 weights at the 27B geometry. The reference is FP32 everywhere, TF32 off, in plain PyTorch: layers are
widened one at a time as they are read. Parts, in the order of `--parts`:

    cached     64K and 117K states cached against read: equal bits
    times      the time of two turns, and the same of their states
    floor      the questions below with nothing rounded but what matrix products read
    questions  1,000 questions on prompts of 250 tokens: ours, transformers' BF16, decisions changed
    long       the same on prompts of 4,000 and 24,000 tokens
    budget     the error that each rounding adds by itself
    float8     FP8 weights: ours and the compressed-tensors library's way, on prompts of 250 tokens
"""

import argparse
import gc
import json
import platform
import time
import traceback
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import engine
import parity
import torch
from engine import Bench, answers, synchronize
from engine_rows import ROWS, Row
from exact import exact, exact_while, kept
from geometries import GEOMETRY_27B, GEOMETRY_TINY
from peers import Peer
from rounding import KERNELS, POINTS, STREAM
from torch import Tensor

from d3serve.model.passes import PreparedJob

STATE_ONCE = 1_000  # tokens of a state from which transformers reads it once instead of once a question
BATCH = 16  # questions that transformers gets at once: a 24K state's cache is repeated for each
ANSWERS_ROWS = 60_000

QUESTIONS = Row("250 tokens", 210, 50, 40, jobs=20)
LONG = (Row("4,000 tokens", 3_960, 32, 40, jobs=2), Row("24,000 tokens", 23_960, 48, 40))
BUDGET = Row("budget", 210, 24, 40, jobs=3)
TIMED = tuple(
    row for row in ROWS if row.name in ("150-token state, 1 question of 100", "24K state, 4 questions of 100")
)
FLOAT8 = Row("FP8, 250 tokens", 210, 50, 40, jobs=8)
PARTS = ("cached", "times", "questions", "floor", "long", "budget", "float8")
OPERANDS = {
    "normed rows, to a mixer",
    "normed rows, to an MLP",
    "normed rows, to the readout",
    "gated attention",
    "gated norm's output",
    "silu(gate) * up",
}
MENDS = {
    "all of a BF16 pass": set(POINTS),
    "the same, and the stream": {*POINTS, STREAM},
    "all but the out and down products": {*POINTS} - {"out product", "down product"},
    "all but every product": {each for each in POINTS if "product" not in each},
    "all but the kernels of the rule": {*POINTS} - {KERNELS[0]},
}


class Report:
    """What was found so far, written after every part; and how much time is left."""

    def __init__(
        self, folder: Path | None, seconds: float, head: dict[str, Any], references: Path | None = None
    ) -> None:
        """Write to `folder`, if there is one; `seconds` count from now; keep FP32 answers in `references`."""
        self.found = head
        self.references = references
        self._folder = folder
        self._began = time.monotonic()
        self._seconds = seconds

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._seconds - (time.monotonic() - self._began)

    def say(self, line: str) -> None:
        """Print a line at once, with the seconds since the start."""
        print(f"[{time.monotonic() - self._began:.0f} s] {line}", flush=True)

    def add(self, part: str, name: str, figures: dict[str, Any]) -> None:
        """Keep figures, print them and write everything."""
        self.found.setdefault(part, {})[name] = figures
        self.say(f"{part}: {name}: {json.dumps(figures)}")
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "fidelity.json").write_text(json.dumps(self.found, indent=1) + "\n")


def ours(bench: Bench, row: Row, jobs: Sequence[PreparedJob]) -> Tensor:
    """The engine's answers."""
    runner = bench.engine(rows=min(ANSWERS_ROWS, row.tokens + 64), slots=len(jobs) + 1)
    found = answers(runner, jobs)
    del runner
    free_memory()
    return found


def theirs(bench: Bench, peer: Peer, job: PreparedJob) -> Tensor:
    """Transformers' answers."""
    state, blocks = bench.on_device(job.state), [bench.on_device(block) for block in job.blocks]
    ask = peer.state_once if len(state) >= STATE_ONCE else peer.whole_prompts_batched
    size = BATCH if len(state) >= STATE_ONCE else len(blocks)
    parts = [ask(state, blocks[first : first + size]) for first in range(0, len(blocks), size)]
    free_memory()
    return torch.cat([parity.probabilities(part) for part in parts])


def peers_of(bench: Bench, options: argparse.Namespace) -> dict[str, Peer]:
    """Transformers with its vectors in FP32, as ours are, and all in BF16, as it loads a package."""
    if options.no_peers:
        return {}
    return {"transformers, vectors in FP32": bench.peer, "transformers": bench.loaded_peer}


def with_reference(bench: Bench, report: Report, part: str, row: Row) -> tuple[list[PreparedJob], Tensor]:
    """A row's jobs, as many as there was time to measure in FP32, and their FP32 answers."""
    bench.reseed()
    jobs, began = bench.jobs(row), time.monotonic()
    weights = "float8" if part == "float8" else "bfloat16"
    file = report.references and report.references / f"{weights}, {row.name}.pt"
    reference = kept(file, lambda: exact_while(bench, jobs, frozenset(), lambda: report.left > 60))
    report.say(f"{row.name}: FP32 in {time.monotonic() - began:.1f} s")
    free_memory()
    return jobs[: len(reference) // row.questions], reference


def compare(bench: Bench, report: Report, part: str, row: Row, others: dict[str, Peer]) -> None:
    """Answers to a row's jobs: ours and the others', against FP32."""
    jobs, reference = with_reference(bench, report, part, row)
    figures: dict[str, Any] = {"spread of p": round(float(reference.std()), 4)}
    figures["ours"] = parity.errors(ours(bench, row, jobs), reference)
    report.add(part, row.name, figures)
    for name, peer in others.items():
        found = []
        for job in jobs:
            if report.left < 20:
                break
            found.append(theirs(bench, peer, job))
        if found:
            answered = torch.cat(found)
            figures[name] = parity.errors(answered, reference[: len(answered)])
            report.add(part, row.name, figures)


def check_reference(bench: Bench, report: Report) -> None:
    """The reference against transformers' own layers in FP32: two programs, one definition."""
    row = Row("oracle", 150, 3, 100)
    (job,) = bench.jobs(row)
    place = (bench.on_device(job.state), [bench.on_device(block) for block in job.blocks])
    wanted = parity.probabilities(parity.reference_logits(bench.peer, *place))
    apart = float((exact(bench, [job]) - wanted).abs().max())
    report.add(
        "reference",
        "largest difference from transformers in FP32",
        {"dp": apart, "within noise": apart < parity.NOISE},
    )


def budget(bench: Bench, report: Report, row: Row, names: Sequence[str]) -> None:
    """Each rounding by itself, and some together, against none; `names`: only those with such a part in theirs."""
    jobs, reference = with_reference(bench, report, "budget", row)
    report.add("budget", "the engine itself", parity.errors(ours(bench, row, jobs), reference))
    trials: dict[str, Set[str]] = {**MENDS, **{each: {each} for each in (*POINTS, STREAM)}}
    if bench.device.type != "cuda" and not _interpreted():
        trials = {name: points - {*KERNELS} for name, points in trials.items() if name not in KERNELS}
    trials = {name: trials[name] for name in trials if any(each in name for each in names)}
    for name, points in trials.items():
        if report.left < 15:
            report.say("no time for the rest of the budget")
            break
        report.add("budget", name, parity.errors(exact(bench, jobs, points), reference))
        free_memory()
    print(table(report.found["budget"]), flush=True)


def floor(bench: Bench, report: Report, row: Row) -> None:
    """What no pass on BF16 tensor cores can avoid: nothing is rounded but the operands of matrix products."""
    jobs, reference = with_reference(bench, report, "floor", row)
    found = exact_while(bench, jobs, OPERANDS, lambda: report.left > 60)
    report.add("floor", row.name, parity.errors(found, reference[: len(found)]))
    free_memory()


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def table(found: dict[str, dict[str, Any]]) -> str:
    """The budget as markdown, largest first, with each one's share of the squares of all."""
    alone = sorted((each for each in found if each in POINTS), key=lambda each: -found[each]["rms"])
    total = sum(found[each]["rms"] ** 2 for each in alone)
    lines = ["| rounded to BF16 | rms of dp | share of the squares |", "| --- | --- | --- |"]
    lines += [
        f"| {each} | {found[each]['rms']:.5f} | {found[each]['rms'] ** 2 / total:.1%} |" for each in alone
    ]
    lines.append(f"| root of their sum | {total**0.5:.5f} | |")
    lines += [f"| {each} | {found[each]['rms']:.5f} | |" for each in found if each not in POINTS]
    return "\n".join(lines)


def float8(bench: Bench, report: Report, row: Row, *, inputs: bool) -> None:
    """FP8 weights against FP32 products with the very numbers that they stand for; ends the plain weights.

    With `inputs` those of linear layers too.
    """
    from formats import library_rounding

    from d3serve.kernels.matrix import quantize_rows
    from d3serve.model.checkpoint import quantizable
    from d3serve.model.weights import to_float8

    names = quantizable(bench.geometry, inputs=inputs)
    bench.weights = to_float8(bench.weights, inputs=inputs)
    for name in names:
        values, scale = quantize_rows(bench.tensors[name])
        bench.tensors[name].copy_(values.float() * scale)  # what the library unpacks to, in BF16
    library = Peer(bench.geometry, bench.tensors, bench.weights.readout)
    for name in names:
        module = library.model.get_submodule(name.removesuffix(".weight"))
        module.register_forward_pre_hook(library_rounding)
    free_memory()
    compare(bench, report, "float8-all" if inputs else "float8", row, {"compressed-tensors": library})


def timed(bench: Bench, report: Report, part: str, rows: Sequence[Row]) -> None:
    """The time of a turn, and whether a state in the cache gives the answers that it gave as it was read."""
    for row in rows:
        found = engine.measure(bench, row, peers=False, profile=False, floors=False)
        report.add(part, row.name, {key: found[key] for key in ("ours_ms", "cached_against_read")})
        free_memory()


def round_vectors(bench: Bench) -> None:
    """Give norms, gates and taps values that BF16 holds, as a package stores them: else BF16 peers have others."""
    for tensor in bench.tensors.values():
        if tensor.dtype == torch.float32:
            tensor.copy_(tensor.bfloat16())


def free_memory() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parts_of(bench: Bench, report: Report, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """What each part does."""
    shrink = small if options.tiny else lambda row: row

    def questions() -> None:
        check_reference(bench, report)
        compare(bench, report, "questions", shrink(QUESTIONS), peers_of(bench, options))

    def long() -> None:
        for row in LONG:
            compare(bench, report, "long", shrink(row), peers_of(bench, options))

    return {
        "cached": lambda: timed(bench, report, "cached", [shrink(row) for row in ROWS[-2:]]),
        "questions": questions,
        "floor": lambda: floor(bench, report, shrink(QUESTIONS)),
        "times": lambda: timed(bench, report, "times", [shrink(row) for row in TIMED]),
        "long": long,
        "budget": lambda: budget(bench, report, shrink(BUDGET), options.roundings),
        "float8": lambda: float8(bench, report, shrink(FLOAT8), inputs=options.inputs),
    }


def small(row: Row) -> Row:
    """A row to try the script on."""
    state = row.state if row.state < STATE_ONCE else STATE_ONCE + row.state // 100
    return Row(row.name, state, min(row.questions, 8), row.question, jobs=min(row.jobs, 2))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument(
        "--references", type=Path, default=None, help="a folder where FP32 answers are kept for the next run"
    )
    parser.add_argument("--inputs", action="store_true", help="of FP8: the inputs of linear layers too")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out, but for FP8")
    parser.add_argument(
        "--roundings",
        nargs="*",
        default=[""],
        help="of the budget, only those with such a part in their name",
    )
    parser.add_argument(
        "--seconds", type=float, default=560, help="no part begins, and none goes on, beyond these"
    )
    parser.add_argument("--tiny", action="store_true", help="a small geometry, to try the script itself")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    head = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor(),
        "torch": torch.__version__,
    }
    report = Report(options.out, options.seconds, head, options.references)
    device = torch.device("cuda" if on_gpu else "cpu")
    bench = Bench(GEOMETRY_TINY if options.tiny else GEOMETRY_27B, device, torch.bfloat16)
    synchronize(device)
    report.say("weights drawn")
    parts = parts_of(bench, report, options)
    for name in options.parts:
        if name != "cached":  # that one wants taps whose products are rounded
            round_vectors(bench)
        if report.left < 30:
            report.say(f"no time for {name}")
            continue
        try:
            parts[name]()
        except Exception as error:  # what the other parts find is worth having
            traceback.print_exc()
            report.add(name, "failed", {"error": f"{type(error).__name__}: {error}"[:300]})
        free_memory()


if __name__ == "__main__":
    main()
