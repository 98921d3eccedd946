"""FP8 or INT4 against BF16: the same weights, the same rows, the same run.

    python benchmarks/formats.py --out DIR [--format fp8|fp8-all|int4] [--rows SUBSTRING ...] [--held GB ...]

Random BF16 weights at the 27B geometry are timed, quantized as the published packages are, and timed again. Parity is
checked first, against a reference in FP32 with unpacked weights and beside the compressed-tensors library's own
way to run such a package: weights unpacked to BF16, for FP8 inputs rounded to it and back, products in BF16.
Transformers needs no fla for that, and is sooner done without it: there is nothing to compile.
"""

import argparse
import dataclasses
import gc
import json
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ceilings
import engine
import parity
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from engine import Bench, answers
from engine_rows import Row
from geometries import GEOMETRY_27B, GEOMETRY_TINY
from peers import Peer
from torch import Tensor
from weight_formats import BY_NAME, FORMATS, Format

from d3serve.kernels.matrix import Float8Matrix, quantize_rows
from d3serve.kernels.operations import linear
from d3serve.model.backbone import row_bytes, slot_bytes
from d3serve.model.capacity import plan_memory
from d3serve.model.weights import Weights

MEASURED = (
    "24K state, 4 questions of 100",
    "64 jobs of 150-token states, 4 questions of 100",
    "150-token state, 1 question of 100",
    "150-token state, 16 questions of 80",
    "24K state cached, 4 questions of 100",
)
GEOMETRY_SMALL = dataclasses.replace(
    GEOMETRY_27B, vocab_size=4096, hidden=1024, ffn=3584, heads=6, kv_heads=1, linear_key_heads=2,
    linear_value_heads=6, layer_types=GEOMETRY_27B.layer_types[:4],
)  # fmt: skip
SAME_NOISE = 1.15  # two draws of one noise over 8 states differ by less
SAME_ROUNDING = 1.01  # scales rounded to BF16 or not move single inputs by a step of FP8, either way
FEW = 100  # questions whose noise says nothing
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
PRODUCTS = {
    "qkvz": (16_384, 5120),
    "qkv": (14_336, 5120),
    "out": (5120, 6144),
    "gate_up": (34_816, 5120),
    "down": (5120, 17_408),
}


TOWER_BYTES, TOWER_WORK_BYTES = 921_460_192, 552_738_816  # of the 27B's vision tower, as the plan counts them

STARTED = time.monotonic()


def say(line: str) -> None:
    """Print a line at once, with the seconds since the start."""
    print(f"[{time.monotonic() - STARTED:.0f} s] {line}", flush=True)


def library_rounding(_module: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round a Linear's input to FP8 and back as the library does, row by row."""
    settings = QuantizationArgs(**ACTIVATIONS)
    scale, zero = compute_dynamic_scales_and_zp(inputs[0], settings, torch.nn.Module())
    return (fake_quantize(inputs[0], scale, zero, settings),)


def peer_of(bench: Bench, tensors: dict[str, Tensor], rounded: Iterable[str]) -> Peer:
    """Transformers on `tensors`; what the weights named `rounded` read is rounded."""
    peer = Peer(bench.geometry, tensors, bench.weights.readout)
    for name in rounded:
        peer.model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(library_rounding)
    return peer


def check_pass(form: Format, bench: Bench, states: int, questions: int) -> str:
    """A small pass with quantized weights and the library's, both against FP32; SystemExit when ours errs more."""
    exact, unpacked = dict(bench.tensors), dict(bench.tensors)
    names = form.names(bench.geometry)
    for name in names:
        exact[name] = form.unpacked(bench.tensors[name])
        unpacked[name] = exact[name].to(bench.dtype)
    bench.weights = form.quantize(bench.weights)
    jobs = bench.jobs(Row("parity", 150, questions, 40, jobs=states))
    ours = answers(bench.engine(rows=states * (150 + 40 * questions), slots=states + 1), jobs)
    exact_peer, rounded = peer_of(bench, exact, ()), names if form.rounds_inputs else ()
    library = peer_of(bench, unpacked, rounded)
    wanted, theirs = [], []
    for job in jobs:
        place = (bench.on_device(job.state), [bench.on_device(block) for block in job.blocks])
        wanted.append(parity.probabilities(parity.reference_logits(exact_peer, *place)))
        theirs.append(parity.probabilities(library.whole_prompts_batched(*place)))
    errors = [each - torch.cat(wanted) for each in (ours, torch.cat(theirs))]
    our, their = (float(each.square().mean().sqrt()) for each in errors)
    line = (
        f"a small pass, {len(ours)} questions, against FP32 with unpacked weights: rms of dp ours {our:.5f}, the "
        f"library's {their:.5f}; largest {float(errors[0].abs().max()):.4f} and {float(errors[1].abs().max()):.4f}; "
        f"spread of p {float(torch.cat(wanted).std()):.3f}"
    )
    if len(ours) > FEW and our > SAME_NOISE * their:
        raise SystemExit(f"parity does not hold, so nothing is timed: {line}")
    return line


def check_graph(bench: Bench) -> str:
    """Compare a pass replayed as a CUDA graph with the same pass launched by the host."""
    runner = bench.engine(rows=1024, slots=2)
    (job,) = bench.jobs(Row("graph", 150, 1, 100))
    read = []
    for _ in range(4):  # eager, eager while it is captured, replayed, replayed
        read.append(answers(runner, [job]))
        engine.forget_all(runner)
    if not all(torch.equal(read[0], each) for each in read[1:]):
        raise SystemExit("a captured pass answers otherwise than an eager one")
    return "250 tokens, captured = eager: equal to the last bit"


def check_products(device: torch.device, tokens: int, shapes: dict[str, tuple[int, int]]) -> Iterator[str]:
    """Each product of a layer at full size: errors against FP32 with unpacked weights, and rates."""
    for name, (rows, columns) in shapes.items():
        drawn = torch.randn(rows, columns, device=device) / columns**0.5
        weight, x = (
            Float8Matrix(*quantize_rows(drawn)),
            torch.randn(tokens, columns, device=device).bfloat16(),
        )
        unpacked, few = weight.values.float() * weight.scale, x[:512]
        plain = unpacked.bfloat16()
        (values, scale), (rounded,) = quantize_rows(few), library_rounding(None, (few,))
        ours, theirs = linear(few, weight), linear(rounded, plain)
        our, their = (error(each, few.float() @ unpacked.T) for each in (ours, theirs))
        our_sums = error(ours, (values.float() * scale) @ unpacked.T)
        their_sums = error(theirs, rounded.float() @ unpacked.T)
        line = (
            f"{name} [{rows}, {columns}]: relative error {our:.5f}, the library's {their:.5f}; "
            f"without what rounds the inputs {our_sums:.5f} and {their_sums:.5f}"
        )
        if our > SAME_ROUNDING * their:
            raise SystemExit(f"an FP8 product errs more than the library's: {line}")
        if not torch.equal(ours, linear(x, weight)[: len(few)]):
            line += "; NOT the same rows among others"
        if device.type == "cuda":
            rates = [2e-9 * tokens * rows * columns / ms for ms in product_times(weight, plain, x)]
            names = ("FP8", "slower sums", "with quantization", "BF16")
            shown = ", ".join(f"{kind} {rate:.0f}" for kind, rate in zip(names, rates, strict=True))
            line += f"; TFLOP/s at {tokens} rows: {shown}"
        yield line


def error(ours: Tensor, wanted: Tensor) -> float:
    """The relative error of a product."""
    return float((ours.float() - wanted).norm() / wanted.norm())


def product_times(weight: Float8Matrix, plain: Tensor, x: Tensor) -> list[float]:
    """Milliseconds of a product: quantized rows, the same with slower sums, rows to be quantized, BF16."""
    from d3serve.kernels.float8 import quantize_activations

    quantized = quantize_activations(x)
    scales = {"scale_a": quantized.scale, "scale_b": weight.scale.T, "out_dtype": x.dtype}
    runs = (
        lambda: linear(quantized, weight),
        lambda: torch._scaled_mm(quantized.values, weight.values.T, **scales, use_fast_accum=False),  # noqa: SLF001
        lambda: linear(x, weight),
        lambda: linear(x, plain),
    )
    return [ceilings.timed_ms(run, repeats=10, warmup=2) for run in runs]


def resident_bytes(weights: Weights) -> int:
    """Memory of the device that all parameters take."""
    held = weights.norm.nbytes + weights.readout.nbytes
    held += 0 if weights.embedding.is_pinned() else weights.embedding.nbytes
    return held + sum(
        part.nbytes
        for layer in weights.layers
        for owner in (layer, layer.mixer)
        for part in vars(owner).values()
        if hasattr(part, "nbytes")
    )


def measure(bench: Bench, rows: Sequence[Row], *, profile: bool = False) -> dict[str, Any]:
    """Times and answers to fixed jobs of one kind of weights; of the long state also its products alone."""
    figures: dict[str, Any] = {"weights_gb": resident_bytes(bench.weights) / 1e9}
    for row in rows:
        bench.reseed()
        runner = bench.engine(rows=row.jobs * row.state + row.question_tokens + 64, slots=row.jobs + 1)
        ms, both = engine.engine_ms(bench, runner, row)
        found = {"ms": ms, "questions_s": 1000 * row.jobs * row.questions / ms}
        if row.name == MEASURED[0] and bench.device.type == "cuda":
            matrices = [matrix for layer in bench.weights.layers for matrix in engine.matrices_of(layer)]
            found["products_ms"] = ceilings.gemms_ms(matrices, row.tokens)
            del matrices
        say(f"{row.name}: {json.dumps(found)}")
        if row.name == MEASURED[0] and profile:
            found["kernels"] = engine.kernel_times(bench, runner, row)
            say("\n".join(found["kernels"]))
        figures[row.name] = {**found, "answers": both[0]}
        del runner
        free_memory()
    return figures


def long_row(bench: Bench, row: Row, most_gb: int) -> dict[str, float]:
    """A row where this process may take so much of the device: pools and passes as the worker plans them.

    The vision tower's weights stand there too, and what it takes at work is left free.
    """
    free_memory()
    tower = torch.empty(TOWER_BYTES, dtype=torch.uint8, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(most_gb * 1e9 / total)
    torch.cuda.reset_peak_memory_stats()
    free = most_gb * 10**9 - torch.cuda.memory_reserved() - TOWER_WORK_BYTES
    unpacked = bench.weights.unpacked_bytes
    plan = plan_memory(bench.geometry, bench.dtype, free, shares_state=True, unpacked_bytes=unpacked)
    if plan.pass_rows < row.tokens:
        raise SystemExit(f"{most_gb} GB hold passes of {plan.pass_rows} rows, fewer than {row.tokens}")
    ms, _ = engine.engine_ms(bench, bench.planned(plan), row)
    figures = {
        "ms": ms,
        "may_take_gb": most_gb,
        "peak_gb": torch.cuda.max_memory_reserved() / 1e9,
        "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "pool_rows": plan.rows,
        "slots": plan.slots,
        "pool_gb": (
            plan.rows * row_bytes(bench.geometry, bench.dtype)
            + plan.slots * slot_bytes(bench.geometry, bench.dtype)
        )
        / 1e9,
    }
    say(f"{row.name} in {most_gb} GB: {json.dumps(figures)}")
    del tower
    return figures


def free_memory() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(form: Format, plain: dict[str, Any], quantized: dict[str, Any], rows: Sequence[Row]) -> str:
    """The two side by side, as markdown."""
    name = form.title
    lines = [
        f"| request | BF16 ms (products) | {name} ms (products) | {name} ÷ BF16 | bound | {name} questions/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        a, b = plain[row.name], quantized[row.name]
        cells = [f"{each['ms']:.1f} ({each.get('products_ms', 0):.1f})" for each in (a, b)]
        ratio, bound = f"{b['ms'] / a['ms']:.3f}", str(form.bounds.get(row.name, ""))
        lines.append(f"| {row.name} | {' | '.join(cells)} | {ratio} | {bound} | {b['questions_s']:.0f} |")
    return "\n".join(lines)


def compare(plain: Tensor, quantized: Tensor) -> str:
    """What a format changes in answers of random weights, which turn small differences into large ones."""
    changed = parity.changed_decisions(quantized, plain)
    moved = (quantized - plain).abs()
    noise = f"rms of dp {float(moved.square().mean().sqrt()):.4f}, largest {float(moved.max()):.4f}"
    return f"{noise}, decisions changed {changed} of {len(plain)}"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Check, then measure BF16, the format and its long rows."""
    form = FORMATS[options.format]
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    shapes = (
        {name: (rows // 16, columns // 16) for name, (rows, columns) in PRODUCTS.items()}
        if options.tiny
        else PRODUCTS
    )
    small = GEOMETRY_TINY if options.tiny else GEOMETRY_SMALL
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor(),
        "torch": torch.__version__,
        "parity": [check_pass(form, Bench(small, device, dtype), *((2, 2) if options.tiny else (8, 16)))],
    }
    say(report["parity"][0])
    products = check_products(device, 64 if options.tiny else 24_976, shapes) if form.rounds_inputs else ()
    for line in products:  # INT4's are in int4.py
        report["parity"].append(line)
        say(line)
    rows = [BY_NAME[name] for name in MEASURED if any(part in name for part in options.rows)]
    if options.tiny:
        rows = [dataclasses.replace(row, state=min(row.state, 200), jobs=min(row.jobs, 2)) for row in rows]
    bench = Bench(GEOMETRY_TINY if options.tiny else GEOMETRY_27B, device, dtype)
    plain = report["bf16"] = measure(bench, rows)
    bench.weights = form.quantize(bench.weights)
    bench.tensors.clear()
    free_memory()
    if on_gpu:
        report["allocated_gb"] = torch.cuda.memory_allocated() / 1e9
        say(f"allocated with {form.title} weights alone: {report['allocated_gb']:.2f} GB")
        report["graph"] = check_graph(bench)
        say(report["graph"])
        free_memory()
    quantized = report[options.format] = measure(bench, rows, profile=options.profile)
    for row in rows:
        line = compare(plain[row.name].pop("answers"), quantized[row.name].pop("answers"))
        report.setdefault(f"{options.format} against bf16", {})[row.name] = line
        say(f"{row.name}: {form.title} against BF16: {line}")
    say(f"weights: BF16 {plain['weights_gb']:.2f} GB, {form.title} {quantized['weights_gb']:.2f} GB")
    report["table"] = table(form, plain, quantized, rows)
    if on_gpu and not options.tiny:
        held = [(row, most_gb) for row, most_gb in form.held if most_gb in options.held]
        report["long"] = [long_row(bench, row, most_gb) for row, most_gb in held]
    say("\n" + report["table"])
    return report


def main() -> None:
    """Check, measure both, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--rows", nargs="*", default=MEASURED, help="only rows whose name contains one of these"
    )
    parser.add_argument("--format", choices=FORMATS, default="fp8")
    parser.add_argument(
        "--held", nargs="*", type=int, default=[24, 40, 60], help="long states in so many GB; none is none"
    )
    parser.add_argument("--profile", action="store_true", help="device time by kernel of the 24K row")
    parser.add_argument("--tiny", action="store_true", help="a small geometry, to try the script itself")
    options = parser.parse_args()
    report = run(options)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"formats-{options.format}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
