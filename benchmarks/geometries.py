"""The geometries that are measured: d3-turbo's, and a small one to try a script on."""

import dataclasses

from d3serve.model.config import Geometry
from d3serve.model.vision_config import VisionGeometry, VisionTokens

GEOMETRY_27B = Geometry(
    vocab_size=248_320, hidden=5120, ffn=17_408,
    layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 16,
    heads=24, kv_heads=4, head_dim=256, rotary_dim=64, rope_theta=10_000_000.0,
    linear_key_heads=16, linear_value_heads=48, linear_key_dim=128, linear_value_dim=128,
    conv_width=4, eps=1e-6, max_positions=262_144,
)  # fmt: skip
GEOMETRY_TINY = dataclasses.replace(
    GEOMETRY_27B, vocab_size=1024, hidden=256, ffn=512, heads=6, kv_heads=1, head_dim=64, rotary_dim=16,
    linear_key_heads=2, linear_value_heads=6, linear_key_dim=64, linear_value_dim=64,
    layer_types=(("linear_attention",) * 2 + ("full_attention",)) * 2,
)  # fmt: skip
VISION_27B = VisionGeometry(
    depth=27, hidden=1152, ffn=4304, heads=16, side=48, out_hidden=5120, rope_theta=10_000.0, sections=(11, 11, 10),
    tokens=VisionTokens(image=248_056, video=248_057, start=248_053, end=248_054), kinds=("image", "video"),
)  # fmt: skip
VISION_TINY = dataclasses.replace(
    VISION_27B, depth=2, hidden=96, ffn=128, heads=4, side=6, out_hidden=256, tokens=VisionTokens(1, 2, 3, 4)
)
