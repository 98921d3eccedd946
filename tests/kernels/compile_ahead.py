"""Compile our Triton kernels for a card that need not be here: `python compile_ahead.py 89 [--all]`.

The launchers run as they would, on little tensors, with the card's tiles; instead of a launch each kernel is compiled
down to machine code. Prints a JSON list: what each takes of the card. Without --all only the kernels that take most,
in BF16.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from d3serve.kernels import cards, convolution, float8, fused, gated_delta, int4, narrow, prefix_bidir
from d3serve.kernels.attention_plan import AttentionPlan
from d3serve.kernels.matrix import Int4Matrix
from d3serve.kernels.recurrence_plan import plan_recurrence
from d3serve.kernels.segments import AttentionShape, Segment

KB = 1024
# Capability -> shared memory that a program may take, of the CUDA programming guide's table; multiprocessors.
CARDS = {
    80: cards.Card((8, 0), 163 * KB, 108),  # A100
    86: cards.Card((8, 6), 99 * KB, 84),  # A10, RTX 3090
    89: cards.Card((8, 9), 99 * KB, 142),  # L4, L40S, RTX 4090
    90: cards.Card((9, 0), 227 * KB, 132),  # H100, H200
    100: cards.Card((10, 0), 227 * KB, 148),  # B200
    120: cards.Card((12, 0), 99 * KB, 170),  # RTX 5090, RTX PRO 6000
}
# the 27B
H, HK, D = 24, 4, 256
LINEAR_HK, LINEAR_HV, LINEAR_D = 16, 48, 128
HIDDEN, FFN = 5120, 17_408
CHANNELS = (2 * LINEAR_HK + LINEAR_HV) * LINEAR_D
CPU = torch.device("cpu")
SEGMENTS = (
    Segment(0, 70, 0, final_slot=0),
    Segment(70, 10, 70, prefix_start=0, prefix_length=70, initial_slot=0),
)
ROWS = 80
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class AbsentDriver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def attend(dtype: torch.dtype) -> None:
    shape = AttentionShape(False, H, HK, D, dtype, CPU)
    segments = [
        Segment(0, 3_000, 0),
        Segment(3_000, 20, 3_000, 0, 3_000),
    ]  # keys of the last are cut, and merged
    plan: AttentionPlan = prefix_bidir.plan_attention(prefix_bidir.cut_attention(segments, shape), shape)
    assert plan.launch.merges
    q, k, v = (empty(3_020, heads, D, dtype=dtype) for heads in (H, HK, HK))
    list(prefix_bidir.attention_steps(q, k, v, torch.empty_like(q), plan, softmax_scale=D**-0.5))


def delta_rule(dtype: torch.dtype) -> None:
    q, k = (empty(ROWS, LINEAR_HK, LINEAR_D, dtype=dtype) for _ in range(2))
    v, gates = empty(ROWS, LINEAR_HV, LINEAR_D, dtype=dtype), empty(ROWS, LINEAR_HV, dtype=torch.float32)
    states = empty(1, LINEAR_HV, LINEAR_D, LINEAR_D, dtype=torch.float32)
    plan = plan_recurrence(SEGMENTS, device="cpu")
    gated_delta.gated_delta_rule(q, k, v, gates, gates, states, plan, scale=LINEAR_D**-0.5)


def multiply_packed() -> None:
    """Also where no pass would: whoever measures it on another card begins with a kernel that fits."""
    for rows, tokens in (
        (HIDDEN, (20, 60, 128, 250)),
        (16_384, (180, 250)),
        (2 * FFN, (90,)),
    ):  # each tile of Hopper's
        weight = Int4Matrix.empty(rows, 256, 128, CPU)
        for count in tokens:
            int4.multiply_packed(empty(count, 256, dtype=torch.bfloat16), weight)


def small_steps(dtype: torch.dtype, *, eight_bits: bool) -> None:
    wide = empty(ROWS, CHANNELS + 2 * LINEAR_HV, dtype=dtype)
    mixed, b, a = wide.split((CHANNELS, LINEAR_HV, LINEAR_HV), dim=1)
    gates = empty(LINEAR_HV, dtype=torch.float32)
    convolution.gdn_prepare(
        mixed, b, a, empty(CHANNELS, 4, dtype=dtype), empty(1, CHANNELS, 3, dtype=dtype), gates, gates,
        plan_recurrence(SEGMENTS, device="cpu"),
        key_heads=LINEAR_HK, value_heads=LINEAR_HV, key_dim=LINEAR_D, value_dim=LINEAR_D,
    )  # fmt: skip
    x, residual = empty(ROWS, HIDDEN, dtype=dtype), empty(ROWS, HIDDEN, dtype=torch.float32)
    qkv, angles = empty(ROWS, (2 * H + 2 * HK) * D, dtype=dtype), empty(ROWS, 64, dtype=torch.float32)
    head = empty(D, dtype=dtype)
    pools = [empty(ROWS, HK, D, dtype=dtype) for _ in range(2)]
    fused.qk_norm_rope_store(
        qkv,
        head,
        head,
        angles,
        angles,
        *pools,
        torch.arange(ROWS),
        heads=H,
        kv_heads=HK,
        head_dim=D,
        eps=1e-6,
    )
    fused.embed(torch.arange(ROWS), x)
    fused.sigmoid_gate(empty(ROWS, H, D, dtype=dtype), qkv)
    values, z = empty(ROWS, LINEAR_HV, LINEAR_D, dtype=dtype), empty(ROWS, LINEAR_HV * LINEAR_D, dtype=dtype)
    fused.gated_rms_norm(values, z, empty(LINEAR_D, dtype=torch.float32), 1e-6)
    for quantized in (False, True) if eight_bits else (False,):
        fused.add_rms_norm(x, residual, empty(HIDDEN, dtype=torch.float32), 1e-6, float8=quantized)
        fused.silu_mul(empty(ROWS, 2 * FFN, dtype=dtype), float8=quantized)
    if eight_bits:
        fused.add_rms_norm(x, residual, empty(HIDDEN, dtype=torch.float32), 1e-6, float8=True, both=True)
        gates = empty(2 * LINEAR_HV, HIDDEN, dtype=dtype)
        for rows in (ROWS, narrow.MANY_ROWS):
            narrow.narrow_linear(
                empty(rows, HIDDEN, dtype=dtype), gates, empty(rows, CHANNELS, dtype=dtype)[:, -len(gates) :]
            )
        float8.quantize_activations(x)
    int4.unpack(Int4Matrix.empty(HIDDEN, FFN, 128, CPU), dtype)


def resources(kernel: object) -> dict[str, int]:
    """What a compiled kernel takes: registers and stack of a thread, shared memory of a program; and its waits."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        code = subprocess.run(
            [CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout).groups()
    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": kernel.metadata.shared,
        "products": code.count("HGMMA."),
        "waits": code.count("WARPGROUP.DEPBAR"),
    }


def compiled(capability: int, *, everything: bool) -> list[dict[str, object]]:
    """Every kernel that the launchers of a card would run, and its resources."""
    card = CARDS[capability]
    driver.set_active(AbsentDriver(capability))
    cards.card = lambda _device: card
    found: dict[object, dict[str, object]] = {}
    launch, current = JITFunction.run, {}

    def compile_only(self: JITFunction, *args: object, **options: object) -> object:
        kernel = launch(self, *args, **{**options, "warmup": True})
        found[kernel.hash] = {"kernel": self.fn.__name__, **current, **resources(kernel)}
        return kernel

    JITFunction.run = compile_only
    for dtype in (torch.bfloat16, torch.float32) if everything else (torch.bfloat16,):
        current["dtype"] = str(dtype).removeprefix("torch.")
        attend(dtype)
        delta_rule(dtype)
        if dtype == torch.bfloat16:
            multiply_packed()
        if everything:
            small_steps(dtype, eight_bits=card.has_float8 and dtype == torch.bfloat16)
    return list(found.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capability", type=int, choices=CARDS)
    parser.add_argument("--all", action="store_true", help="every kernel, in BF16 and in FP32")
    options = parser.parse_args()
    sys.stdout.write(json.dumps(compiled(options.capability, everything=options.all)))
