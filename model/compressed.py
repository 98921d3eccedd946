"""Quantized weights in the compressed-tensors formats: what a package declares, and exact unpacking.

Formulas and bit order are those of the compressed-tensors library, which tests compare with bit by bit.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from d3serve.kernels.matrix import Int4Matrix, in_byte_order
from d3serve.model.fields import Fields
from d3serve.model.registry import NO_FP4

INT4_OFFSET = 8  # four-bit values are stored as value + 8
PARTS = {
    "plain": frozenset[str](),
    "float8": frozenset({"weight", "weight_scale"}),
    "int4": frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape"}),
}
# What an FP8 product rounds its input to: each row by a scale of its own, found as it comes.
FLOAT8_ROWS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


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


def read_scheme(config: Fields) -> Scheme:
    """Understand the `quantization_config` in a package's `config.json`.

    Raises:
        InvalidCheckpoint: a method, format or detail that we do not unpack; the message holds its value.
    """
    text = config.values.get("text_config")
    if config.values.get("quantization_config") is None and isinstance(text, dict):
        config = config.section("text_config")  # where some tools write it
    if config.values.get("quantization_config") is None:
        return Scheme("plain")
    declared = config.section("quantization_config")
    form = declared.values.get("format")
    if declared.values.get("quant_method") != "compressed-tensors":
        raise declared.refuse("quant_method", "only compressed-tensors packages are read")
    if str(form).startswith("nvfp4"):
        raise declared.refuse("format", NO_FP4)
    for name in ("kv_cache_scheme", "transform_config"):
        if declared.values.get(name):
            raise declared.refuse(name, "this would change answers, and we do not compute it")
    groups = _groups(declared)
    if form == "float-quantized":
        return _float8(groups)
    if form == "pack-quantized":
        return _int4(declared, groups)
    raise declared.refuse("format", "expected float-quantized or pack-quantized")


def _float8(groups: list[Fields]) -> Scheme:
    _require(groups[0].section("weights"), num_bits=8, type="float", strategy="channel", symmetric=True)
    for group in groups:
        _require(group.section("input_activations"), **FLOAT8_ROWS)
    return Scheme("float8")


def _int4(declared: Fields, groups: list[Fields]) -> Scheme:
    weights = groups[0].section("weights")
    _require(weights, num_bits=4, type="int", strategy="group", actorder=(None, False, "static", "weight"))
    if any(group.values.get("input_activations") is not None for group in groups):
        raise declared.refuse("config_groups", "expected unquantized activations")
    symmetric = weights.one_of("symmetric", True, False, default=True)
    return Scheme("int4", symmetric=symmetric, group_size=weights.integer("group_size"))


def _groups(declared: Fields) -> list[Fields]:
    """The groups of modules, all with one kind of weights."""
    section = declared.section("config_groups")
    groups = [section.section(name) for name in section.values]
    if not groups or any(each.values.get("weights") != groups[0].values.get("weights") for each in groups):
        raise declared.refuse("config_groups", "expected one kind of weights")
    return groups


def _require(section: Fields, **allowed: Any) -> None:
    for name, wanted in allowed.items():
        options = wanted if isinstance(wanted, tuple) else (wanted,)
        section.one_of(name, *options, default=None)


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
    rows, columns = _int4_shape(parts, scheme)
    values = _unpack(parts["weight_packed"], rows, columns).view(rows, -1, scheme.group_size).float()
    if not scheme.symmetric:
        values -= _zero_points(parts, scale.shape)[:, :, None].float()
    return (values * scale[:, :, None]).view(rows, columns)


def repack(parts: dict[str, Tensor], scheme: Scheme) -> Int4Matrix:
    """Return a module's INT4 weight in the layout that products read; it stays packed on the way.

    Raises:
        ValueError: the parts' shapes or types do not belong together.
    """
    rows, columns = _int4_shape(parts, scheme)
    words, scale = parts["weight_packed"], parts["weight_scale"]
    _require_packed(words, rows, columns)
    # A byte holds two neighbours, the even one below. We want a byte's columns to be eight apart.
    first, second = words.view(torch.uint8).view(rows, len(scale.T), -1, 2, 2, 4).unbind(4)
    even, odd = (first & 0xF) | (second << 4), (first >> 4) | (second & 0xF0)
    values = in_byte_order(torch.stack((even, odd), dim=-1)).transpose(0, 1)
    zero = torch.zeros_like(scale, dtype=torch.int8) if scheme.symmetric else _zero_points(parts, scale.shape)
    return Int4Matrix(values, scale.T, (zero + INT4_OFFSET).T.to(torch.uint8))


def _int4_shape(parts: dict[str, Tensor], scheme: Scheme) -> tuple[int, int]:
    """Rows and columns of an INT4 weight, which its scales must fit."""
    shape, scale = parts["weight_shape"], parts["weight_scale"]
    if shape.shape != (2,) or shape.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"a shape of {list(shape.shape)} numbers, {shape.dtype}")
    rows, columns = shape.tolist()
    groups = columns // scheme.group_size
    if scale.shape != (rows, groups) or groups * scheme.group_size != columns:
        raise ValueError(f"scales {list(scale.shape)} for a weight of {[rows, columns]}")
    return rows, columns


def _zero_points(parts: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """Zero points [rows, groups] int8, packed along the rows."""
    rows, groups = shape
    return _unpack(parts["weight_zero_point"].mT, groups, rows).mT


def _unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Four-bit values [rows, columns] int8 of int32 words [rows, columns / 8], lowest bits first."""
    _require_packed(packed, rows, columns)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    values = (packed[:, :, None] >> shifts) & 0xF
    return values.flatten(1)[:, :columns].to(torch.int8) - INT4_OFFSET


def _require_packed(packed: Tensor, rows: int, columns: int) -> None:
    if packed.dtype != torch.int32 or packed.shape != (rows, -(-columns // 8)):
        raise ValueError(f"{packed.dtype} {list(packed.shape)} packs no {rows} rows of {columns}")
