"""Sizes of the published checkpoints, as the parameter totals of their manifests confirm them."""

from dataclasses import dataclass

from d3serve.model.config import Geometry


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


TURBO = geometry_of(SIZES["d3, d3-turbo, d3-ultra"])
