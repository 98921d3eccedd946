"""The tensors that we expect are those of the published packages: parameter totals agree to the last one."""

from dataclasses import dataclass

import pytest
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from d3serve.errors import InvalidCheckpoint
from d3serve.model.checkpoint import quantizable, require_memory
from d3serve.model.config import CODES, Geometry
from d3serve.model.weights import Allocator


@dataclass(frozen=True)
class Published:
    """Published sizes: (GDN, full) layers, (q, kv) heads, GDN (k, v) heads, vision (depth, hidden, ffn, heads)."""

    layers: tuple[int, int]
    hidden: int
    ffn: int
    heads: tuple[int, int]
    linear_heads: tuple[int, int]
    vision: tuple[int, int, int, int]
    loaded: int


SIZES = {
    "d3, d3-turbo, d3-ultra": Published(
        (48, 16), 5120, 17_408, (24, 4), (16, 48), (27, 1152, 4304, 16), 26_086_635_760
    ),
    "d3-flash": Published((24, 8), 4096, 12_288, (16, 4), (16, 32), (27, 1152, 4304, 16), 8_393_739_504),
    "d3-mini": Published((24, 8), 2560, 9216, (16, 4), (16, 32), (24, 1024, 4096, 16), 4_539_918_336),
    "d3-nano": Published((18, 6), 2048, 6144, (8, 2), (16, 16), (24, 1024, 4096, 16), 2_213_763_904),
    "d3-lite": Published((18, 6), 1024, 3584, (8, 2), (16, 16), (12, 768, 3072, 12), 853_247_040),
}


def geometry_of(size: Published) -> Geometry:
    linear, full = size.layers
    return Geometry(
        vocab_size=248_320,
        hidden=size.hidden,
        ffn=size.ffn,
        layer_types=("linear_attention",) * linear + ("full_attention",) * full,
        heads=size.heads[0],
        kv_heads=size.heads[1],
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        linear_key_heads=size.linear_heads[0],
        linear_value_heads=size.linear_heads[1],
        linear_key_dim=128,
        linear_value_dim=128,
        conv_width=4,
        eps=1e-6,
        max_positions=262_144,
    )


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
    require_memory(geometry, torch.bfloat16, names, free_bytes=33_000_000_000)
