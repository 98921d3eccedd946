"""Write a checkpoint's FP8 or INT4 sibling in the published layout, with the compressed-tensors library.

    python tools/quantize_checkpoint.py PACKAGE FOLDER --format fp8|int4|int4-symmetric

The modules are those of the published packages (all projections but the inputs of linear layers); scales are plain
minima and maxima in BF16, without calibration. For measuring what a format costs, and for tests.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from make_tiny_checkpoint import write_json, write_manifest
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
GROUP = 128
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "fp8": ("float-quantized", FLOAT8, ACTIVATIONS),
    "int4": ("pack-quantized", INT4 | {"symmetric": False}, None),
    "int4-symmetric": ("pack-quantized", INT4 | {"symmetric": True}, None),
}
LEAST = 1e-8  # a scale; rows of zeros stay zero
QUANTIZED = (".mlp.", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "_attn.o")


def library_scheme(kind: str) -> QuantizationScheme:
    """The library's description of a format."""
    _, weights, activations = FORMATS[kind]
    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=activations and QuantizationArgs(**activations),
    )


def compressor(kind: str) -> Any:
    """The library's packer of a format."""
    return BaseCompressor.get_value_from_registry(FORMATS[kind][0])


def compress(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """A module's tensors [rows, columns] as the library stores them; columns in whole groups for INT4."""
    return dict(
        compressor(kind).compress({"weight": weight, **_scales(weight.float(), kind)}, library_scheme(kind))
    )


def _scales(weight: Tensor, kind: str) -> dict[str, Tensor]:
    if kind == "fp8":
        return {"weight_scale": (weight.abs().amax(1, keepdim=True) / 448).clamp(min=LEAST).bfloat16()}
    grouped = weight.unflatten(1, (-1, GROUP))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if kind == "int4-symmetric":
        scale, zero = (grouped.abs().amax(-1) / 7.5).clamp(min=LEAST), torch.zeros_like(low)
    else:
        scale = ((high - low) / 15).clamp(min=LEAST)
        zero = (-8 - low / scale).round().clamp(-8, 7)
    return {"weight_scale": scale.bfloat16(), "weight_zero_point": zero.to(torch.int8)}


def quantize(package: Path, folder: Path, kind: str) -> Path:
    """Copy a package of one weights file to `folder`, its projections quantized."""
    shutil.copytree(package, folder)
    tensors = load_file(package / "model.safetensors")
    for name in [name for name in tensors if any(part in name for part in QUANTIZED)]:
        module = name.removesuffix("weight")
        parts = compress(tensors.pop(name).bfloat16(), kind)
        tensors |= {module + part: tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    form, weights, activations = FORMATS[kind]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    declared = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    config = json.loads((package / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", config | {"quantization_config": declared})
    write_manifest(folder)
    return folder


def main() -> None:
    """Write the sibling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=FORMATS, required=True)
    options = parser.parse_args()
    print(quantize(options.package, options.folder, options.format))


if __name__ == "__main__":
    main()
