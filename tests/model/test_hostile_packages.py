"""A package that was made to hang a load, and one whose convolution is stored in FP32."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from d3serve.errors import InvalidCheckpoint
from d3serve.model.engine import DecisionEngine
from d3serve.model.manifest import check_package


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "readout.safetensors",
        "config.json",
        "decision_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_refused(package, name):
    (package / name).unlink()
    os.mkfifo(package / name)
    with pytest.raises(InvalidCheckpoint, match=name):
        DecisionEngine.load(str(package), device="cpu")
    if "token" not in name:
        with pytest.raises(InvalidCheckpoint, match=name):
            check_package(package)


def test_a_convolution_in_fp32_is_not_rounded(package):
    tensors = load_file(package / "model.safetensors")
    name = next(name for name in tensors if name.endswith("conv1d.weight"))
    exact = tensors[name].float() * (1 + 2**-12)
    save_file({**tensors, name: exact}, package / "model.safetensors")
    engine = DecisionEngine.load(str(package), device="cpu", dtype="bfloat16")
    convolutions = [
        layer.mixer.conv for layer in engine.backbone.weights.layers if hasattr(layer.mixer, "conv")
    ]
    assert any(torch.equal(conv, exact[:, 0]) for conv in convolutions)
