"""Where a model runs, in which numbers and by which kernels: what a caller may ask for, and what there is."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, get_args

import torch

from d3serve.errors import InvalidSettings
from d3serve.kernels import cards
from d3serve.kernels.attention_dense import flash3_fault
from d3serve.kernels.matrix import Float8Matrix
from d3serve.kernels.operations import LinearRule, linear
from d3serve.kernels.segments import LongAttention

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
Quantization = Literal["fp8", "fp8-all"]  # as published packages; the inputs of linear layers too
PROCESSOR: Final = Path("/proc/cpuinfo")
# A processor that multiplies BF16 itself takes a third of the time of FP32 for a pass of d3-lite; others are slower so.
MULTIPLIES_BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16"})
WIDE: Final = (
    1024  # of the narrowest published one; demo-d3, of 256, gains 5 % and moves probabilities by up to 0.3
)


def place(
    device: Device | None, dtype: Dtype | None, quantization: Quantization | None
) -> tuple[torch.device, torch.dtype]:
    """Choose the device and the type of weights and activations; None leaves a choice to us.

    Once the package is known, `default_dtype` knows better which type nobody has asked for.

    Raises:
        InvalidSettings: a value is not one that we know, there is no GPU where one is asked for, it is AMD's, or it
            does not multiply FP8 weights; `field` names the option.
    """
    _require_known("device", device, get_args(Device))
    _require_known("dtype", dtype, get_args(Dtype))
    _require_known("quantization", quantization, get_args(Quantization))
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise InvalidSettings("device is cuda, but PyTorch sees no GPU here", field="device")
    if device != "cpu" and found and torch.version.hip:
        raise InvalidSettings(
            f"PyTorch is built for ROCm {torch.version.hip} here, and the kernels are for NVIDIA's GPUs: choose "
            "device cpu, or install a PyTorch built for CUDA",
            field="device",
        )
    where = torch.device(device or ("cuda" if found else "cpu"))
    kind: torch.dtype = getattr(torch, dtype or ("bfloat16" if where.type == "cuda" else "float32"))
    if quantization and not multiplies_float8(where, kind):
        raise InvalidSettings(
            f"quantization is {quantization}, but this GPU does not multiply FP8 weights by {kind}",
            field="quantization",
        )
    return where, kind


def name_of(device: torch.device) -> str:
    """The card's name, on which bits depend; a CPU has none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def default_dtype(device: torch.device, hidden: int) -> torch.dtype:
    """The type of weights and activations where nobody has asked for one: what the device is fast at, at that width."""
    fast = device.type == "cuda" or (hidden >= WIDE and processor_multiplies_bfloat16())
    return torch.bfloat16 if fast else torch.float32


@cache
def processor_multiplies_bfloat16() -> bool:
    """Whether the system lists AVX-512's or AMX's products of BF16 among what its processor can; no list, no."""
    try:
        lines = PROCESSOR.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return False
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return not MULTIPLIES_BFLOAT16.isdisjoint(flags.split())


def choose_linear_rule(asked: LinearRule | None, device: torch.device, dtype: torch.dtype) -> LinearRule:
    """Whose gated delta rule runs; None takes ours where it was tuned, and on other GPUs fla's if it is installed.

    Raises:
        InvalidSettings: a value is not one that we know, or fla is asked for and cannot be had.
    """
    _require_known("linear_rule", asked, get_args(LinearRule))
    fits = device.type == "cuda" and dtype == torch.bfloat16
    if asked == "fla":
        if not fits:
            raise InvalidSettings(
                "linear_rule is fla, which runs on a GPU, in bfloat16: leave it to us here",
                field="linear_rule",
            )
        if find_spec("fla") is None:
            raise InvalidSettings(
                "linear_rule is fla, but flash-linear-attention is not installed: pip install 'd3serve[gpu]'",
                field="linear_rule",
            )
    if asked is None and fits and not cards.card(device).is_hopper and find_spec("fla") is not None:
        return "fla"
    return asked or "ours"


def choose_long_attention(
    asked: LongAttention | None, device: torch.device, dtype: torch.dtype
) -> LongAttention:
    """Whose attention reads long states; None takes FlashAttention-3's on a Hopper, where it is installed.

    Raises:
        InvalidSettings: a value is not one that we know, or FlashAttention-3 is asked for and cannot be had.
    """
    _require_known("attention", asked, get_args(LongAttention))
    fits = device.type == "cuda" and dtype == torch.bfloat16 and cards.card(device).is_hopper
    if asked == "ours" or (asked is None and not fits):
        return "ours"
    fault = flash3_fault() if fits else "it runs on a Hopper GPU, in bfloat16: leave it to us here"
    if fault is None:
        return asked or "fa3"
    if asked is None:
        return "ours"
    raise InvalidSettings(
        f"attention is {asked}, which needs FlashAttention-3, but {fault}", field="attention"
    )


def multiplies_float8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether activations of `dtype` meet FP8 weights on `device`: BF16 on tensor cores since Ada, any on a CPU."""
    if device.type != "cuda":
        return True
    card = cards.card(device)
    return dtype == torch.bfloat16 and card.has_float8 and (card.is_hopper or _has_float8_product(device))


def multiplies_int4(device: torch.device) -> bool:
    """Whether INT4 weights stay packed on `device`: a GPU's memory is short; a CPU has room and no fast product."""
    return device.type == "cuda"


@cache
def _has_float8_product(device: torch.device) -> bool:
    """Try it: on some cards that could, a build of PyTorch has no product of FP8 with a scale for each row."""
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    weight = Float8Matrix(ones.to(torch.float8_e4m3fn), torch.ones(16, 1, device=device))
    try:
        return bool((linear(ones, weight) == 16.0).all())
    except RuntimeError:
        return False


def _require_known(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise InvalidSettings(f"{name} is {value!r}; expected {' or '.join(known)}", field=name)
