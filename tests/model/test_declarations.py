"""What a package declares of its quantization: known in every part, or refused with the part and its value."""

import json
import shutil

import pytest
from quantize_checkpoint import ACTIVATIONS, FLOAT8, INT4

from d3serve.errors import InvalidCheckpoint
from d3serve.model.package import open_package

REFUSED = {
    "NVFP4 weights need an NVIDIA Blackwell GPU": {"format": "nvfp4-pack-quantized"},
    'quant_method is "gptq"': {"quant_method": "gptq"},
    'format is "int-quantized"': {"format": "int-quantized"},
    "format is null": {"format": None},
    "g: weights: num_bits is 3; expected 4": {
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": {**INT4, "num_bits": 3}}},
    },
    'weights: strategy is "tensor"': {"config_groups": {"g": {"weights": {**FLOAT8, "strategy": "tensor"}}}},
    'weights: actorder is "group"': {
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": {**INT4, "actorder": "group"}}},
    },
    "expected one kind of weights": {"config_groups": {"a": {"weights": FLOAT8}, "b": {"weights": INT4}}},
    "config_groups is []": {"config_groups": []},
    "config_groups is {}; expected one kind of weights": {"config_groups": {}},
    "weights is null": {"config_groups": {"g": {}}},
    "weights is 8": {"config_groups": {"g": {"weights": 8}}},
    "group_size is true": {
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": {**INT4, "group_size": True}}},
    },
    "input_activations is null": {"config_groups": {"g": {"weights": FLOAT8}}},
    'input_activations: strategy is "tensor"': {
        "config_groups": {
            "g": {"weights": FLOAT8, "input_activations": ACTIVATIONS | {"strategy": "tensor"}},
        }
    },
    "b: input_activations: dynamic is false": {
        "config_groups": {
            "a": {"weights": FLOAT8, "input_activations": ACTIVATIONS},
            "b": {"weights": FLOAT8, "input_activations": ACTIVATIONS | {"dynamic": False}},
        }
    },
    'kv_cache_scheme is {"num_bits": 8}': {"kv_cache_scheme": {"num_bits": 8}},
    'transform_config is {"config_groups"': {"transform_config": {"config_groups": {"u": {}}}},
    "expected unquantized activations": {
        "format": "pack-quantized",
        "config_groups": {
            "a": {"weights": INT4},
            "b": {"weights": INT4, "input_activations": ACTIVATIONS},
        },
    },
}


ODD_WEIGHTS = {
    "num_bits is 4; expected 8": ("float-quantized", FLOAT8 | {"num_bits": 4}),
    'type is "int"; expected "float"': ("float-quantized", FLOAT8 | {"type": "int"}),
    "symmetric is false; expected true": ("float-quantized", FLOAT8 | {"symmetric": False}),
    'type is "float"; expected "int"': ("pack-quantized", INT4 | {"type": "float"}),
    'strategy is "channel"; expected "group"': ("pack-quantized", INT4 | {"strategy": "channel"}),
}
REFUSED |= {
    reason: {"format": form, "config_groups": {"g": {"weights": weights}}}
    for reason, (form, weights) in ODD_WEIGHTS.items()
}


@pytest.mark.parametrize("declared", [[], "fp8", 8, True])
def test_a_declaration_that_is_no_object_is_refused(declared, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "package")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": declared}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InvalidCheckpoint, match=r"config\.json: quantization_config is .*; expected an object"
    ):
        open_package(folder)


@pytest.mark.parametrize("reason", REFUSED)
def test_formats_that_we_do_not_unpack_are_refused(reason, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "package")
    declared = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    declared |= {"config_groups": {"g": {"weights": FLOAT8}}} | REFUSED[reason]
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": declared}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidCheckpoint) as refused:
        open_package(folder)
    assert reason in refused.value.message
