"""The linear layers' kernels on the GPU: parity first, then one layer's time beside fla's gated delta rule.

    python benchmarks/linear.py [--rows 250,5270] [--out FOLDER]

Geometry: the 27B (16 key heads, 48 value heads, 128 x 128 states). A row's first segment is the state, unless
the state is cached. Times are medians of replays of one CUDA graph; `eager` is the wall time without one.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ceilings import copy_tb_s, delta_rule_ms, in_graph, repeats_for, timed_ms
from geometries import GEOMETRY_27B

from d3serve.kernels import fused, reference
from d3serve.kernels.convolution import gdn_prepare
from d3serve.kernels.gated_delta import gated_delta_rule
from d3serve.kernels.recurrence_plan import plan_recurrence
from d3serve.kernels.segments import Segment

G = GEOMETRY_27B
CHANNELS = 2 * G.linear_key_heads * G.linear_key_dim + G.linear_value_heads * G.linear_key_dim
INNER = G.linear_value_heads * G.linear_key_dim
EPS = 1e-6
ROWS: dict[str, tuple[bool, list[int]]] = {  # name: (state cached, segment lengths)
    "250": (False, [150, 100]),
    "400 cached": (True, [100] * 4),
    "1430": (False, [150, *[80] * 16]),
    "5270": (False, [150, *[80] * 64]),
    "24.6K": (False, [24_200, *[100] * 4]),
    "117K": (False, [116_800, 100, 100]),
}


def segments_of(cached: bool, lengths: list[int]) -> list[Segment]:
    """Slot 0 holds the state, whether it is computed in this pass or was before."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        Segment(start, length, start, initial_slot=-1, final_slot=0)
        if i == 0 and not cached
        else Segment(start, length, start, initial_slot=0)
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


class Layer:
    """Random inputs of one gated-delta-rule layer for one row, and the layer's non-GEMM work on them."""

    def __init__(self, cached: bool, lengths: list[int]) -> None:
        generator = torch.Generator("cuda").manual_seed(len(lengths))
        rows = sum(lengths)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.segments = segments_of(cached, lengths)
        self.plan = plan_recurrence(self.segments, device="cuda")
        self.projected = normal(rows, CHANNELS + INNER + 2 * G.linear_value_heads)
        self.conv_weight = normal(CHANNELS, 4)
        self.a_log = torch.rand(G.linear_value_heads, generator=generator, device="cuda") * 2
        self.dt_bias = normal(G.linear_value_heads)
        self.norm_weight = normal(G.linear_key_dim)
        self.conv_states = normal(1, CHANNELS, 3)
        self.states = torch.randn(
            1, G.linear_value_heads, G.linear_key_dim, G.linear_key_dim, generator=generator, device="cuda"
        )
        self.prepared = self.prepare()
        self.ruled = self.rule()

    def prepare(self) -> tuple[torch.Tensor, ...]:
        """Convolution, norms and gates."""
        mixed, _, b, a = self.projected.split(
            (CHANNELS, INNER, G.linear_value_heads, G.linear_value_heads), dim=1
        )
        return gdn_prepare(
            mixed,
            b,
            a,
            self.conv_weight,
            self.conv_states,
            self.a_log,
            self.dt_bias,
            self.plan,
            key_heads=G.linear_key_heads,
            value_heads=G.linear_value_heads,
            key_dim=G.linear_key_dim,
            value_dim=G.linear_key_dim,
        )

    def rule(self) -> torch.Tensor:
        """Run the gated delta rule."""
        return gated_delta_rule(*self.prepared, self.states, self.plan, scale=G.linear_key_dim**-0.5)

    def norm(self) -> torch.Tensor:
        """Norm and gate its output."""
        z = self.projected[:, CHANNELS : CHANNELS + INNER]
        return fused.gated_rms_norm(self.ruled, z, self.norm_weight, EPS)

    def run(self) -> None:
        """All of it."""
        self.prepared = self.prepare()
        self.ruled = self.rule()
        self.norm()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64; NaN stays NaN and passes no bound."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def parity() -> dict[str, float]:
    """Errors of our rule and of fla's in bfloat16 against the reference in float32, state then questions."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    lengths = [150, 1, 64, 65, 100]
    layer = Layer(cached=False, lengths=lengths)
    scale = G.linear_key_dim**-0.5
    plan = reference.Plan(tuple(layer.segments))
    states = torch.zeros_like(layer.states)
    expected = reference.gated_delta_rule(*(x.float() for x in layer.prepared), states, plan, scale=scale)

    def peer(
        rows: slice, cu_seqlens: list[int], initial: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g, beta = (x[None, rows] for x in layer.prepared)
        boundaries = torch.tensor(cu_seqlens, device="cuda")
        out, final = chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=boundaries,
        )
        return out[0], final

    first, state = peer(slice(0, 150), [0, 150], None)
    rest, _ = peer(slice(150, None), [0, 1, 65, 130, 230], state.expand(4, -1, -1, -1).contiguous())
    mixed, _, b, a = layer.projected.split(
        (CHANNELS, INNER, G.linear_value_heads, G.linear_value_heads), dim=1
    )
    prepared = reference.gdn_prepare(
        mixed, b, a, layer.conv_weight, layer.conv_states.clone(), layer.a_log, layer.dt_bias, plan,
        key_heads=G.linear_key_heads, value_heads=G.linear_value_heads,
        key_dim=G.linear_key_dim, value_dim=G.linear_key_dim,
    )  # fmt: skip
    return {
        "rule": relative_error(layer.ruled, expected),
        "rule of fla": relative_error(torch.cat((first, rest)), expected),
        "state": relative_error(layer.states, states),
        "state of fla": relative_error(state, states),
        "prepare": max(relative_error(x, y) for x, y in zip(layer.prepared, prepared, strict=True)),
    }


def check(errors: dict[str, float]) -> None:
    """Refuse to time kernels that are wrong: twice the peer's error is the bound, and NaN passes nothing."""
    print("relative errors:", {name: f"{error:.2e}" for name, error in errors.items()}, flush=True)
    right = errors["rule"] <= 2 * errors["rule of fla"] and errors["state"] <= 2 * errors["state of fla"]
    if not (right and errors["prepare"] < 5e-3):
        raise SystemExit("parity failed: nothing is reported")


def eager_ms(run: Callable[[], object], repeats: int) -> float:
    """Mean wall time of one call when Python launches every kernel."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / repeats


def graph_us(run: Callable[[], object], tokens: int) -> float:
    """Time of one `run` inside a graph, microseconds; short ones stand in a row, to hide the replay's own start."""
    copies = 10 if tokens < 2_000 else 1
    return (
        1e3 * timed_ms(in_graph(lambda: [run() for _ in range(copies)]), repeats=repeats_for(tokens)) / copies
    )


def measure(name: str, cached: bool, lengths: list[int]) -> dict[str, object]:
    """One row of the table, microseconds a layer."""
    layer = Layer(cached, lengths)
    tokens = sum(lengths)
    times = {
        part: graph_us(run, tokens)
        for part, run in (
            ("prepare", layer.prepare),
            ("rule", layer.rule),
            ("norm", layer.norm),
            ("layer", layer.run),
        )
    }
    times["eager"] = 1e3 * eager_ms(layer.run, repeats_for(tokens))
    times["fla rule"] = 1e3 * delta_rule_ms(G, lengths)
    row = {"row": name, "tokens": tokens, "segments": len(lengths)} | {
        k: round(v, 1) for k, v in times.items()
    }
    print(row, flush=True)
    return row


def measure_fused(rows: int) -> dict[str, object]:
    """Time the other small steps at `rows` tokens, microseconds each."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, residual, weight = normal(rows, G.hidden), normal(rows, G.hidden), normal(G.hidden)
    gate_up = normal(rows, 2 * G.ffn)
    qkv = normal(rows, (2 * G.heads + 2 * G.kv_heads) * G.head_dim)
    attended, angles, head = normal(rows, G.heads, G.head_dim), normal(rows, 64), normal(G.head_dim)
    pools = [normal(rows, G.kv_heads, G.head_dim) for _ in range(2)]
    slots = torch.arange(rows, device="cuda")
    shape = {"heads": G.heads, "kv_heads": G.kv_heads, "head_dim": G.head_dim, "eps": EPS}
    runs: dict[str, Callable[[], object]] = {
        "add_rms_norm": lambda: fused.add_rms_norm(x, residual, weight, EPS),
        "silu_mul": lambda: fused.silu_mul(gate_up),
        "qk_norm_rope_store": lambda: fused.qk_norm_rope_store(
            qkv, head, head, angles, angles, *pools, slots, **shape
        ),
        "sigmoid_gate": lambda: fused.sigmoid_gate(attended, qkv),
    }
    times = {name: graph_us(run, rows) for name, run in runs.items()}
    row = {"tokens": rows} | {name: round(value, 1) for name, value in times.items()}
    print(row, flush=True)
    return row


def main() -> None:
    """Check, measure, print, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated names of rows")
    parser.add_argument("--out", type=Path, help="folder for linear.json")
    options = parser.parse_args()
    errors = parity()
    check(errors)
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "copy_tb_s": round(copy_tb_s(), 2),
        "relative_errors": errors,
        "layer_us": [measure(name, *ROWS[name]) for name in options.rows.split(",")],
        "fused_us": [measure_fused(rows) for rows in (250, 5_270, 24_600)],
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "linear.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
