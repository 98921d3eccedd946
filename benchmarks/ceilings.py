"""What the device can do at best: the parts of which a pass's floor is the sum, measured in this run.

A floor is made of three ceilings at the row's own token counts: the layers' matrix products replayed in one
CUDA graph, attention at the speed of the best library, and the gated delta rule replayed in a graph.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from d3serve.kernels.float8 import quantize_activations
from d3serve.kernels.gated_delta import gated_delta_rule
from d3serve.kernels.matrix import Float8Matrix, Matrix, Rows
from d3serve.kernels.operations import linear
from d3serve.kernels.recurrence_plan import plan_recurrence
from d3serve.kernels.segments import Segment
from d3serve.model.config import Geometry

LONG = 10_000  # keys from which cuDNN is known to be twice as fast as flash SDPA


def timed_ms(run: Callable[[], object], *, repeats: int, warmup: int = 1) -> float:
    """The median of `repeats` runs on the device, in milliseconds."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def repeats_for(tokens: int) -> int:
    """Fewer repeats where one run takes seconds, and so is steady by itself."""
    return 20 if tokens < 2_000 else 5 if tokens < 10_000 else 2 if tokens < 40_000 else 1


def in_graph(run: Callable[[], object]) -> Callable[[], object]:
    """`run`, captured once; calling the result replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_tb_s(gigabytes: int = 4) -> float:
    """Device-to-device copy, TB/s, bytes read plus bytes written."""
    source = torch.empty(gigabytes * 2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    ms = timed_ms(lambda: target.copy_(source), repeats=10)
    return 2 * source.numel() / ms / 1e9


def gemms_ms(weights: Sequence[Matrix], tokens: int) -> float:
    """One product with each of `weights` ([out, in], all distinct) for `tokens` rows, in one graph.

    Rows that meet FP8 weights are FP8 before the clock starts.
    """
    inputs: dict[tuple[type, int], Rows] = {}
    outputs: dict[int, torch.Tensor] = {}
    for weight in weights:
        rows, width = weight.shape
        if (key := (type(weight), width)) not in inputs:
            drawn = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
            inputs[key] = quantize_activations(drawn) if isinstance(weight, Float8Matrix) else drawn
        if rows not in outputs:
            outputs[rows] = torch.empty(tokens, rows, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        for weight in weights:
            linear(inputs[type(weight), weight.shape[1]], weight, out=outputs[weight.shape[0]])

    repeats = repeats_for(tokens)
    return timed_ms(in_graph(run), repeats=repeats, warmup=int(repeats > 1))  # in_graph has run it once


def attention_ms(geometry: Geometry, rows: int, keys: int) -> float:
    """The better of cuDNN and flash SDPA for `rows` that see all of `keys`, one layer, in a graph."""
    query = torch.randn(1, geometry.heads, rows, geometry.head_dim, dtype=torch.bfloat16, device="cuda")
    key, value = (
        torch.randn(1, geometry.kv_heads, keys, geometry.head_dim, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    best = float("inf")
    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    for backend in backends[: 1 if keys > LONG else 2]:
        with sdpa_kernel(backend):

            def run() -> torch.Tensor:
                return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

            try:
                best = min(best, timed_ms(in_graph(run), repeats=repeats_for(rows)))
            except RuntimeError:
                continue  # this backend refuses the shape; the other decides
    return best


def delta_rule_ms(geometry: Geometry, states: Sequence[int], questions: Sequence[int]) -> float:
    """The gated delta rule of a pass, one layer, in a graph: our own kernel, the fastest that was measured.

    fla's takes 1.5 to 2.3 times as long (`linear.py`), so a floor made with it would be too easy.
    """
    tokens, dim = sum(states) + sum(questions), geometry.linear_key_dim
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    query, key = (
        F.normalize(torch.randn(tokens, geometry.linear_key_heads, dim, **shape), dim=-1) for _ in "qk"
    )
    value = torch.randn(tokens, geometry.linear_value_heads, dim, **shape)
    decay = -torch.rand(tokens, geometry.linear_value_heads, device="cuda")
    strength = torch.rand(tokens, geometry.linear_value_heads, device="cuda")
    slots = torch.randn(max(1, len(states)), geometry.linear_value_heads, dim, dim, device="cuda")
    plan = plan_recurrence(_segments(states, questions), device="cuda")

    def run() -> None:
        gated_delta_rule(query, key, value, decay, strength, slots, plan, scale=dim**-0.5)

    run()
    return timed_ms(in_graph(run), repeats=repeats_for(tokens))


def _segments(states: Sequence[int], questions: Sequence[int]) -> list[Segment]:
    """States first, each into a slot of its own; the questions share the states evenly."""
    segments, row = [], 0
    for slot, length in enumerate(states):
        segments.append(Segment(row, length, row, final_slot=slot))
        row += length
    for index, length in enumerate(questions):
        segments.append(Segment(row, length, row, initial_slot=index * max(1, len(states)) // len(questions)))
        row += length
    return segments
