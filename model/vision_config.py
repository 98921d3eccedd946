"""What a package says about its vision tower: sizes, control tokens, rotary sections, and how files are prepared."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt

from d3serve.model.config import Geometry
from d3serve.model.fields import Fields
from d3serve.model.media import CHANNELS, MERGE, PATCH, TEMPORAL, MediaKind

MROPE_SECTIONS = (11, 11, 10)  # what transformers takes where a package says nothing
BICUBIC = 3  # Pillow's number


@dataclass(frozen=True)
class VisionGeometry:
    """Sizes of the vision tower, and how its features stand among a backbone's tokens.

    `side` is that of the square table of positions. `sections` tells how many rotary frequencies turn by time, row
    and column. `kinds` are the media that the package has processors for.
    """

    depth: int
    hidden: int
    ffn: int
    heads: int
    side: int
    out_hidden: int
    rope_theta: float
    sections: tuple[int, ...]
    tokens: "VisionTokens"
    kinds: tuple[MediaKind, ...]

    @property
    def head_dim(self) -> int:
        """Numbers of one head: 72 or 64 in the published sizes."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """How many numbers the tower's weights are; a Python integer, which no sizes overflow."""
        h, merged = self.hidden, self.hidden * MERGE**2
        block = 4 * h * (h + 1) + 2 * h * self.ffn + self.ffn + h + 4 * h
        merger = 2 * h + merged * (merged + 1) + self.out_hidden * (merged + 1)
        return h * (self.patch_values + 1) + self.side**2 * h + self.depth * block + merger

    @property
    def patch_values(self) -> int:
        """Numbers of one patch."""
        return CHANNELS * TEMPORAL * PATCH**2


@dataclass(frozen=True)
class VisionTokens:
    """Ids of the control tokens around and in place of media."""

    image: int
    video: int
    start: int
    end: int

    def pad(self, kind: MediaKind) -> int:
        """The id that stands once for each token of such a medium."""
        return self.image if kind == "image" else self.video


def read_vision(
    config: Fields, text: Geometry, processors: Mapping[MediaKind, Fields]
) -> VisionGeometry | None:
    """Understand the tower that `config.json` describes; None for a package of text alone.

    Args:
        config: `config.json`.
        text: the backbone that reads the features.
        processors: the files that say how media are prepared; a package without any takes text alone too.

    Raises:
        InvalidCheckpoint: a tower or a preparation that we do not compute.
    """
    if config.values.get("vision_config") is None or not processors:
        return None
    vision = config.section("vision_config")
    _require_known(vision, text)
    for processor in processors.values():
        _require_our_preparation(processor)
    rope = config.section("text_config").section("rope_parameters")
    geometry = VisionGeometry(
        depth=vision.integer("depth"),
        hidden=vision.integer("hidden_size"),
        ffn=vision.integer("intermediate_size"),
        heads=vision.integer("num_heads"),
        side=isqrt(vision.integer("num_position_embeddings")),
        out_hidden=vision.integer("out_hidden_size"),
        rope_theta=_rope_theta(vision),
        sections=_sections(rope),
        tokens=VisionTokens(
            *(
                config.integer(f"{name}_token_id", least=0)
                for name in ("image", "video", "vision_start", "vision_end")
            )
        ),
        kinds=tuple(processors),
    )
    if geometry.hidden % (4 * geometry.heads):  # a head turns by row and by column, each in pairs
        raise vision.refuse("hidden_size", "expected a multiple of four times num_heads")
    if geometry.side**2 != vision.integer("num_position_embeddings"):
        raise vision.refuse("num_position_embeddings", "expected a square")
    return geometry


def _require_known(vision: Fields, text: Geometry) -> None:
    vision.one_of("model_type", "qwen3_5_vision", default="qwen3_5_vision")
    vision.one_of("hidden_act", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    vision.one_of("in_channels", CHANNELS, default=CHANNELS)
    vision.one_of("patch_size", PATCH, default=PATCH)
    vision.one_of("temporal_patch_size", TEMPORAL, default=TEMPORAL)
    vision.one_of("spatial_merge_size", MERGE, default=MERGE)
    vision.one_of("out_hidden_size", text.hidden)
    if vision.values.get("deepstack_visual_indexes"):
        raise vision.refuse("deepstack_visual_indexes", "expected none: features enter the first layer alone")


def _rope_theta(vision: Fields) -> float:
    if vision.values.get("rope_parameters") is None:
        return 10_000.0
    rope = vision.section("rope_parameters")
    rope.one_of("rope_type", "axial", default="axial")
    return rope.positive("rope_theta")


def _sections(rope: Fields) -> tuple[int, ...]:
    rope.one_of("mrope_interleaved", True, default=True)
    if rope.values.get("mrope_section") is None:
        return MROPE_SECTIONS
    sections: tuple[int, ...] = rope.list_of("mrope_section", int, 3)
    if min(sections) < 0:
        raise rope.refuse("mrope_section", "expected three counts")
    return sections


def _require_our_preparation(processor: Fields) -> None:
    """Sizes are the family's own whatever the file says; the rest must be what prepared files have gone through."""
    for name, ours in (("patch_size", PATCH), ("temporal_patch_size", TEMPORAL), ("merge_size", MERGE)):
        processor.one_of(name, ours, default=ours)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        processor.one_of(name, True, default=True)
    processor.one_of("resample", BICUBIC, default=BICUBIC)
    for name in ("image_mean", "image_std"):
        if processor.values.get(name, [0.5] * CHANNELS) != [0.5] * CHANNELS:
            raise processor.refuse(name, f"expected {[0.5] * CHANNELS}")
    factor = processor.values.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        raise processor.refuse("rescale_factor", "expected 1/255")
