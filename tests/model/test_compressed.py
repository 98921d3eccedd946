"""Quantized packages: unpacked bit by bit as the compressed-tensors library does, or refused with the reason."""

import json
import shutil

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from d3serve.errors import InvalidCheckpoint
from d3serve.model.checkpoint import load_weights
from d3serve.model.compressed import Scheme, dequantize, read_scheme
from d3serve.model.config import load_geometry
from d3serve.model.engine import DecisionEngine
from d3serve.schemas import NoulQuestion

FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
CASES = {
    "float8": ("float-quantized", FLOAT8, ACTIVATIONS, Scheme("float8")),
    "int4 symmetric": ("pack-quantized", INT4 | {"symmetric": True}, None, Scheme("int4", True, 128)),
    "int4 asymmetric": ("pack-quantized", INT4 | {"symmetric": False}, None, Scheme("int4", False, 128)),
}


def library(case):
    form, weights, activations, ours = CASES[case]
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=activations and QuantizationArgs(**activations),
    )
    return BaseCompressor.get_value_from_registry(form), scheme, ours


def compress(weight, case):
    """A module's tensors as the library stores them, with plain min-max scales in BF16."""
    compressor, scheme, ours = library(case)
    if ours.kind == "float8":
        state = {"weight": weight, "weight_scale": (weight.abs().amax(1, keepdim=True) / 448).bfloat16()}
        return compressor.compress(state, scheme)
    grouped = weight.float().unflatten(1, (-1, 128))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if ours.symmetric:
        scale, zero = grouped.abs().amax(-1) / 7.5, torch.zeros_like(low)
    else:
        scale = (high - low) / 15
        zero = (-8 - low / scale).round().clamp(-8, 7)
    state = {"weight": weight, "weight_scale": scale.bfloat16(), "weight_zero_point": zero.to(torch.int8)}
    return compressor.compress(state, scheme)


def drawn(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(16, 128), (17, 256), (9, 384), (40, 1024)])
def test_unpacking_is_exact(case, shape):
    compressor, scheme, ours = library(case)
    parts = compress(drawn(*shape), case)
    assert set(parts) == ours.parts
    expected = compressor.decompress(parts, scheme)["weight"]
    assert torch.equal(dequantize(parts, ours).bfloat16(), expected)
    assert (expected - drawn(*shape)).abs().max() < 0.5, "and it is the weight that was packed"


@pytest.fixture(params=CASES)
def quantized(request, tiny_checkpoint, tmp_path):
    """The tiny checkpoint with the published set of modules quantized, and the same weights unpacked."""
    return write_quantized(request.param, tiny_checkpoint, tmp_path)


def write_quantized(case, tiny_checkpoint, tmp_path):
    packed, plain = (shutil.copytree(tiny_checkpoint, tmp_path / name) for name in ("packed", "plain"))
    form, weights, activations, ours = CASES[case]
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    unpacked = dict(tensors)
    for name in [n for n in tensors if ".mlp." in n or "_attn.o" in n or "self_attn.q_proj" in n]:
        parts = compress(tensors.pop(name), case)
        unpacked[name] = dequantize(parts, ours).bfloat16()
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    save_file(tensors, packed / "model.safetensors")
    save_file(unpacked, plain / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    declared = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    return packed, plain


def test_a_quantized_package_answers_as_its_unpacked_weights(quantized):
    question = {"q": NoulQuestion(type="noul", instructions="Urgent?")}
    answers = []
    for package in quantized:
        engine = DecisionEngine.load(str(package), device="cpu", dtype="bfloat16")
        answers.append(engine.decide([engine.prepare("a state", question)])[0].answers)
    assert answers[0] == answers[1]


def test_parts_of_one_module_may_lie_in_different_files(quantized):
    packed, plain = quantized
    tensors = load_file(packed / "model.safetensors")
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = sorted(tensors, key=lambda name: (name.split(".")[-1], name))
    weight_map = {name: files[index >= len(names) // 2] for index, name in enumerate(names)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, packed / file)
    (packed / "model.safetensors").unlink()
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    cpu = torch.device("cpu")
    ours, theirs = (load_weights(each, load_geometry(each), cpu, torch.bfloat16) for each in (packed, plain))
    assert all(torch.equal(a.gate_up, b.gate_up) for a, b in zip(ours.layers, theirs.layers, strict=True))


def refusal(package) -> str:
    with pytest.raises(InvalidCheckpoint) as refused:
        DecisionEngine.load(str(package), device="cpu")
    return refused.value.message


def test_a_missing_part_is_a_missing_tensor(quantized):
    packed, _ = quantized
    tensors = load_file(packed / "model.safetensors")
    del tensors["language_model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, packed / "model.safetensors")
    assert "layers.0.mlp.up_proj.weight is missing, or a part of it" in refusal(packed)


def test_scales_of_another_shape_are_refused(quantized):
    packed, _ = quantized
    tensors = load_file(packed / "model.safetensors")
    tensors["language_model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(3, 1)
    save_file(tensors, packed / "model.safetensors")
    assert "layers.0.mlp.up_proj.weight is packed inconsistently" in refusal(packed)


def test_quantized_tensors_without_a_declaration_are_refused(quantized):
    packed, _ = quantized
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    assert "model.safetensors: tensor language_model.layers." in refusal(packed)


REFUSED = {
    "NVFP4 weights need an NVIDIA Blackwell GPU": {"format": "nvfp4-pack-quantized"},
    "quant_method is 'gptq'": {"quant_method": "gptq"},
    "format is 'int-quantized'": {"format": "int-quantized"},
    "format is None": {"format": None},
    "weights.num_bits is 3": {
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": {**INT4, "num_bits": 3}}},
    },
    "weights.strategy is 'tensor'": {"config_groups": {"g": {"weights": {**FLOAT8, "strategy": "tensor"}}}},
    "weights.actorder is 'group'": {
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": {**INT4, "actorder": "group"}}},
    },
    "expected one kind of weights": {"config_groups": {"a": {"weights": FLOAT8}, "b": {"weights": INT4}}},
    "unquantized activations": {
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": INT4, "input_activations": ACTIVATIONS}},
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_formats_that_we_do_not_unpack_are_refused(reason, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "package")
    declared = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    declared |= {"config_groups": {"g": {"weights": FLOAT8}}} | REFUSED[reason]
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": declared}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidCheckpoint) as refused:
        read_scheme(folder)
    assert reason in refused.value.message
