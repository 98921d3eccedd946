"""Quantized weights in the compressed-tensors formats: what a package declares, and exact unpacking.

Formulas and bit order are those of the compressed-tensors library, which tests compare with bit by bit.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from d3serve.errors import InvalidCheckpoint
from d3serve.model.config import read_json
from d3serve.model.registry import NO_FP4

INT4_OFFSET = 8  # four-bit values are stored as value + 8
PARTS = {
    "plain": frozenset[str](),
    "float8": frozenset({"weight", "weight_scale"}),
    "int4": frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape"}),
}


@dataclass(frozen=True)
class Scheme:
    """How the quantized modules of a package are stored, if it has any.

    `float8`: E4M3 weights with one scale for each output channel. `int4`: eight weights in an int32 along
    the input, with a scale (and, if not symmetric, a zero point) for each group of `group_size` inputs.
    """

    kind: Literal["plain", "float8", "int4"]
    symmetric: bool = True
    group_size: int = 0

    @property
    def parts(self) -> frozenset[str]:
        """The tensors that together hold one module's weight."""
        return PARTS[self.kind] - ({"weight_zero_point"} if self.symmetric else set())


def read_scheme(folder: Path) -> Scheme:
    """Read `quantization_config` of a package.

    Raises:
        InvalidCheckpoint: a method, format or detail that we do not unpack; the message holds its value.
    """
    config = read_json(folder / "config.json")
    declared = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if declared is None:
        return Scheme("plain")
    method, form = declared.get("quant_method"), declared.get("format")
    if method != "compressed-tensors":
        raise _refused("quant_method", method, "only compressed-tensors packages are read")
    if str(form).startswith("nvfp4"):
        raise _refused("format", form, NO_FP4)
    groups = list(declared.get("config_groups", {}).values())
    if not groups or any(group.get("weights") != groups[0].get("weights") for group in groups):
        raise _refused(
            "config_groups", sorted(declared.get("config_groups", {})), "expected one kind of weights"
        )
    weights = groups[0]["weights"]
    if form == "float-quantized":
        _require(weights, num_bits=8, type="float", strategy="channel", symmetric=True)
        return Scheme("float8")
    if form == "pack-quantized":
        _require(
            weights, num_bits=4, type="int", strategy="group", actorder=(None, False, "static", "weight")
        )
        group_size = weights.get("group_size")
        if type(group_size) is not int or group_size < 1 or groups[0].get("input_activations") is not None:
            raise _refused("config_groups", groups[0], "expected a group size and unquantized activations")
        return Scheme("int4", symmetric=weights.get("symmetric") is True, group_size=group_size)
    raise _refused("format", form, "expected float-quantized or pack-quantized")


def _require(weights: dict[str, Any], **allowed: Any) -> None:
    for name, wanted in allowed.items():
        options = wanted if isinstance(wanted, tuple) else (wanted,)
        if weights.get(name) not in options:
            expected = " or ".join(map(repr, options))
            raise _refused(f"weights.{name}", weights.get(name), f"expected {expected}")


def _refused(field: str, value: object, reason: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"config.json: quantization_config.{field} is {value!r}; {reason}", field=field)


def dequantize(parts: dict[str, Tensor], scheme: Scheme) -> Tensor:
    """Return a module's weight [out, in] FP32; one rounding of it gives what the library gives in its type.

    Raises:
        ValueError: the parts' shapes or types do not belong together.
    """
    scale = parts["weight_scale"].float()
    if scheme.kind == "float8":
        weight = parts["weight"]
        if weight.dtype != torch.float8_e4m3fn or scale.shape != (len(weight), 1):
            raise ValueError(f"{weight.dtype} {list(weight.shape)} with scales {list(scale.shape)}")
        return weight.float() * scale
    rows, columns = parts["weight_shape"].tolist()
    groups = columns // scheme.group_size
    if scale.shape != (rows, groups) or groups * scheme.group_size != columns:
        raise ValueError(f"scales {list(scale.shape)} for a weight of {[rows, columns]}")
    values = _unpack(parts["weight_packed"], columns).view(rows, groups, scheme.group_size).float()
    if not scheme.symmetric:
        values -= _unpack(parts["weight_zero_point"].T, rows).T[:, :, None].float()
    return (values * scale[:, :, None]).view(rows, columns)


def _unpack(packed: Tensor, columns: int) -> Tensor:
    """Four-bit values [rows, columns] int8 of int32 words [rows, columns / 8], lowest bits first."""
    if packed.dtype != torch.int32 or packed.shape[1] != -(-columns // 8):
        raise ValueError(f"{packed.dtype} {list(packed.shape)} packs no {columns} columns")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    values = (packed[:, :, None] >> shifts) & 0xF
    return values.flatten(1)[:, :columns].to(torch.int8) - INT4_OFFSET
