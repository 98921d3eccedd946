"""Where a model runs and in which numbers: what a caller may ask for, and what there is."""

from typing import Literal, get_args

import torch

from d3serve.errors import InvalidSettings
from d3serve.model.checkpoint import Quantization, multiplies_float8

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]


def place(
    device: Device | None, dtype: Dtype | None, quantization: Quantization | None
) -> tuple[torch.device, torch.dtype]:
    """Choose the device and the type of weights and activations; None leaves a choice to us.

    Raises:
        InvalidSettings: a value is not one that we know, there is no GPU where one is asked for, or it does not
            multiply FP8 weights; `field` names the option.
    """
    _require_known("device", device, get_args(Device))
    _require_known("dtype", dtype, get_args(Dtype))
    _require_known("quantization", quantization, get_args(Quantization))
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise InvalidSettings("device is cuda, but PyTorch sees no GPU here", field="device")
    where = torch.device(device or ("cuda" if found else "cpu"))
    kind: torch.dtype = getattr(torch, dtype or ("bfloat16" if where.type == "cuda" else "float32"))
    if quantization and not multiplies_float8(where, kind):
        raise InvalidSettings(
            f"quantization is {quantization}, but this GPU does not multiply FP8 weights by {kind}",
            field="quantization",
        )
    return where, kind


def _require_known(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise InvalidSettings(f"{name} is {value!r}; expected {' or '.join(known)}", field=name)
