"""The formats that `formats.py` holds against BF16: how weights become theirs, and what must hold of each."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from engine_rows import ROWS, Row
from torch import Tensor

from d3serve.kernels.matrix import StackedMatrix, quantize_int4, quantize_rows, unpack_int4
from d3serve.model.checkpoint import quantizable
from d3serve.model.config import CODES, Geometry
from d3serve.model.weights import Allocator, FullAttention, Layer, Weights, to_float8

BY_NAME = {row.name: row for row in ROWS}
LONG = Row("117K state, 2 questions of 100", 117_000, 2, 100)
STATE_24K = BY_NAME["24K state, 4 questions of 100"]


@dataclass(frozen=True)
class Format:
    """A way to hold weights.

    `names` are the tensors that it quantizes and `unpacked` what a tensor becomes, in FP32. `held` are rows that must
    fit a process that may take so many GB. `bounds` are the most that rows may take, in times of BF16's.
    """

    title: str
    quantize: Callable[[Weights], Weights]
    names: Callable[[Geometry], set[str]]
    unpacked: Callable[[Tensor], Tensor]
    rounds_inputs: bool
    held: tuple[tuple[Row, int], ...]
    bounds: Mapping[str, float] = field(default_factory=dict)


def unpack_float8(tensor: Tensor) -> Tensor:
    """What FP8 makes of a matrix."""
    values, scale = quantize_rows(tensor)
    return values.float() * scale


def to_int4(weights: Weights) -> Weights:
    """Quantize what d3-W4A16-AWQ does: every matrix but the gates of linear layers. No calibration: for speed alone."""
    table = weights.embedding.cpu()
    table = table.pin_memory() if torch.cuda.is_available() else table
    return dataclasses.replace(weights, embedding=table, layers=tuple(map(layer_to_int4, weights.layers)))


def layer_to_int4(layer: Layer) -> Layer:
    """Quantize one layer."""
    mixer = dataclasses.replace(layer.mixer, out=quantize_int4(layer.mixer.out))
    if isinstance(mixer, FullAttention):
        mixer = dataclasses.replace(mixer, qkv=quantize_int4(mixer.qkv))
    else:
        packed, gates = mixer.inputs.split([len(mixer.inputs) - 2 * len(mixer.A_log), 2 * len(mixer.A_log)])
        mixer = dataclasses.replace(mixer, inputs=StackedMatrix((quantize_int4(packed), gates.clone())))
    gate_up, down = quantize_int4(layer.gate_up), quantize_int4(layer.down)
    return dataclasses.replace(layer, mixer=mixer, gate_up=gate_up, down=down)


def int4_names(geometry: Geometry) -> set[str]:
    """The tensors of those matrices."""
    allocator = Allocator(geometry, torch.device("meta"), torch.bfloat16)
    allocator.weights(CODES)
    inputs = ("in_proj_qkv.weight", "in_proj_z.weight")
    return quantizable(geometry) | {name for name in allocator.targets if name.endswith(inputs)}


FORMATS = {
    "fp8": Format("FP8", to_float8, quantizable, unpack_float8, rounds_inputs=True, held=((LONG, 60),)),
    "fp8-all": Format(
        "FP8 with inputs",
        partial(to_float8, inputs=True),
        partial(quantizable, inputs=True),
        unpack_float8,
        rounds_inputs=True,
        held=((LONG, 60),),
    ),
    "int4": Format(
        "INT4",
        to_int4,
        int4_names,
        lambda tensor: unpack_int4(quantize_int4(tensor)),
        rounds_inputs=False,
        held=((LONG, 40), (STATE_24K, 24)),
        bounds={
            "150-token state, 1 question of 100": 1.0,
            "150-token state, 16 questions of 80": 1.25,
            STATE_24K.name: 1.25,
        },
    ),
}
