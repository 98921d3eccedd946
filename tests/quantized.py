"""Quantized packages for tests: the tiny checkpoint in each format, and what its weights are."""

import shutil

import pytest
import torch
from quantize_checkpoint import quantize
from safetensors.torch import load_file, save_file

from d3serve.errors import InvalidCheckpoint
from d3serve.kernels.matrix import Float8Matrix, Int4Matrix, StackedMatrix, unpack_int4
from d3serve.model.compressed import Scheme, dequantize
from d3serve.model.engine import DecisionEngine

CASES = {
    "fp8": Scheme("float8"),
    "int4-symmetric": Scheme("int4", True, 128),
    "int4": Scheme("int4", False, 128),
}


def drawn(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()


def write_quantized(case, package, tmp_path):
    """A package with some of its modules quantized, and the same weights unpacked.

    Of q, k and v only q, and of the rest what the published packages quantize.
    """
    packed, plain = quantize(package, tmp_path / "packed", case), shutil.copytree(package, tmp_path / "plain")
    tensors, unpacked = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in unpacked:
        module = name.removesuffix("weight")
        parts = {part: tensors[module + part] for part in CASES[case].parts if module + part in tensors}
        if len(parts) < len(CASES[case].parts):
            continue
        if "k_proj" in name or "v_proj" in name:
            tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(module)}
            tensors[name] = unpacked[name]
        else:
            unpacked[name] = dequantize(parts, CASES[case]).bfloat16()
    save_file(tensors, packed / "model.safetensors")
    save_file(unpacked, plain / "model.safetensors")
    return packed, plain


def dense(matrix):
    if isinstance(matrix, StackedMatrix):
        return torch.cat([dense(part) for part in matrix.parts])
    if isinstance(matrix, Int4Matrix):
        return unpack_int4(matrix)
    return matrix.values.float() * matrix.scale if isinstance(matrix, Float8Matrix) else matrix.float()


def listed(answers):
    return [
        probability
        for answer in answers.values()
        for probability in ([answer.noul] if answer.type == "noul" else answer.probabilities.values())
    ]


def refusal(package) -> str:
    with pytest.raises(InvalidCheckpoint) as refused:
        DecisionEngine.load(str(package), device="cpu")
    return refused.value.message
