"""The tensors that we expect are those of the published packages: parameter totals agree to the last one."""

import pytest
import torch
from published import SIZES, Published, geometry_of
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from d3serve.errors import InvalidCheckpoint
from d3serve.model.checkpoint import quantizable, require_memory
from d3serve.model.config import CODES
from d3serve.model.weights import Allocator, Kept


def text_parameters(size: Published) -> int:
    allocator = Allocator(geometry_of(size), torch.device("meta"), torch.bfloat16)
    allocator.weights(CODES)
    return sum(target.numel() for target in allocator.targets.values())


def vision_parameters(size: Published) -> int:
    depth, hidden, ffn, heads = size.vision
    config = Qwen3_5VisionConfig(
        depth=depth, hidden_size=hidden, intermediate_size=ffn, num_heads=heads, out_hidden_size=size.hidden
    )
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Qwen3_5VisionModel(config).parameters())


@pytest.mark.parametrize("name", SIZES)
def test_totals_equal_the_manifests(name):
    size = SIZES[name]
    assert text_parameters(size) + vision_parameters(size) + CODES * size.hidden == size.loaded


def test_the_text_part_of_the_27b():
    assert text_parameters(SIZES["d3, d3-turbo, d3-ultra"]) == 25_624_600_064


def test_weights_that_do_not_fit_are_refused_before_any_is_read():
    geometry = geometry_of(SIZES["d3, d3-turbo, d3-ultra"])
    with pytest.raises(InvalidCheckpoint, match=r"need 51\.3 GB of device memory .* 40\.0 GB are free"):
        require_memory(geometry, torch.bfloat16, free_bytes=40_000_000_000)
    require_memory(geometry, torch.bfloat16, free_bytes=52_000_000_000)


def test_a_quantized_27b_has_the_published_modules_and_size():
    """304 modules: 192 of the MLPs, 64 of attention, 48 output projections of linear layers; under 33 GB."""
    geometry = geometry_of(SIZES["d3, d3-turbo, d3-ultra"])
    names = quantizable(geometry)
    assert len(names) == 304
    require_memory(geometry, torch.bfloat16, Kept(float8=names), free_bytes=33_000_000_000)


def test_with_the_inputs_of_its_linear_layers_a_quantized_27b_is_smaller_by_four_gigabytes():
    """48 linear layers, two matrices each."""
    geometry = geometry_of(SIZES["d3, d3-turbo, d3-ultra"])
    names = quantizable(geometry, inputs=True)
    assert len(names) == 304 + 2 * 48
    require_memory(geometry, torch.bfloat16, Kept(float8=names), free_bytes=27_000_000_000)
