"""What a package says about itself: `decision_config.json` and the text geometry of `config.json`.

Whatever would change an answer is read and understood, or refused with the field and its value.
"""

from dataclasses import dataclass
from typing import Any, Literal

from d3serve.model.fields import Fields, is_positive
from d3serve.model.registry import NO_PUBLIC_LAYOUT

AttentionMode = Literal["prefix_bidir", "causal", "noncausal_full_attention"]
LayerType = Literal["linear_attention", "full_attention"]

ATTENTION_MODES: tuple[AttentionMode, ...] = ("prefix_bidir", "causal", "noncausal_full_attention")
FORMAT_VERSION = 1
FORMAT_ID = "d3-code-readout-v1"
CODES = 255

# Fields that say where a checkpoint comes from, or concern inputs that are refused before the model.
PROVENANCE = frozenset({"base_model", "revision", "model_version", "license", "created", "notes"})
OTHER_INPUTS = ("box", "track", "image", "video", "vision", "media")


@dataclass(frozen=True)
class DecisionConfig:
    """How prompts become probabilities; the fields of `decision_config.json` that we understand.

    `temperature_by_questions` is a sequence of (largest number of questions, temperature), ending with
    an open bucket whose bound is None.
    """

    attention_mode: AttentionMode
    temperature: float
    codes: tuple[str, ...]
    token_ids: tuple[int, ...]
    max_length: int | None
    validated_length: int | None
    prompt_layout: str | None
    temperature_by_questions: tuple[tuple[int | None, float], ...]

    @property
    def shares_state(self) -> bool:
        """Whether reading the state once is exact: not where the state's rows see the question."""
        return self.attention_mode != "noncausal_full_attention"

    def temperature_for(self, questions: int) -> float:
        """Return the temperature of a job of this many questions.

        The published list has one temperature more than bounds; that the last one is open-ended, and that
        the list replaces `temperature`, is inferred from its shape.
        """
        for bound, temperature in self.temperature_by_questions:
            if bound is None or questions <= bound:
                return temperature
        return self.temperature


@dataclass(frozen=True)
class Geometry:
    """Sizes of the text backbone."""

    vocab_size: int
    hidden: int
    ffn: int
    layer_types: tuple[LayerType, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_width: int
    eps: float
    max_positions: int

    @property
    def conv_channels(self) -> int:
        """C: channels of q | k | v of a linear layer."""
        keys = self.linear_key_heads * self.linear_key_dim
        return 2 * keys + self.linear_value_heads * self.linear_value_dim

    @property
    def full_layers(self) -> int:
        """How many layers keep K and V."""
        return self.layer_types.count("full_attention")

    @property
    def linear_layers(self) -> int:
        """How many layers keep a recurrent and a conv state."""
        return self.layer_types.count("linear_attention")

    @property
    def parameters(self) -> int:
        """How many numbers the backbone's weights are; a Python integer, which no sizes overflow."""
        values = self.linear_value_heads * self.linear_value_dim
        full = 2 * self.head_dim + self.hidden * self.head_dim * (3 * self.heads + 2 * self.kv_heads)
        linear = (
            self.hidden * (self.conv_channels + 2 * values + 2 * self.linear_value_heads)
            + self.conv_channels * self.conv_width
            + 2 * self.linear_value_heads
            + self.linear_value_dim
        )
        around = 3 * self.ffn * self.hidden + 2 * self.hidden
        layers = self.full_layers * (full + around) + self.linear_layers * (linear + around)
        return layers + self.vocab_size * self.hidden + self.hidden


def read_decision(fields: Fields, *, any_layout: bool) -> DecisionConfig:
    """Understand `decision_config.json`; `any_layout` leaves it to the package's own code to render the layout.

    Raises:
        InvalidCheckpoint: a value, or a field that could change answers, is not one that we know.
    """
    _refuse_unknown(fields)
    fields.one_of("format_version", FORMAT_VERSION)
    fields.one_of("format_id", FORMAT_ID)
    fields.one_of("prompt", "d3")
    fields.one_of("pooling", "last")
    fields.one_of("readout_dtype", "float32", default="float32")
    layout = fields.values.get("prompt_layout")
    if layout is not None and not (any_layout and isinstance(layout, str)):
        raise fields.refuse("prompt_layout", NO_PUBLIC_LAYOUT)
    return DecisionConfig(
        attention_mode=fields.one_of("attention_mode", *ATTENTION_MODES),
        temperature=fields.positive("temperature"),
        codes=fields.list_of("codes", str, CODES),
        token_ids=fields.list_of("token_ids", int, CODES),
        max_length=fields.optional_integer("max_length", least=16),
        validated_length=fields.optional_integer("validated_length", least=16),
        prompt_layout=layout,
        temperature_by_questions=_temperature_buckets(fields),
    )


KNOWN_FIELDS = frozenset(
    {
        "format_version",
        "format_id",
        "prompt",
        "codes",
        "token_ids",
        "temperature",
        "attention_mode",
        "pooling",
    }
    | {"max_length", "readout_dtype", "validated_length", "prompt_layout", "temperature_by_questions"}
)


def _refuse_unknown(fields: Fields) -> None:
    for name in fields.values:
        if name in KNOWN_FIELDS or name in PROVENANCE or name.startswith(OTHER_INPUTS):
            continue
        raise fields.refuse(name, "this field is unknown here, and ignoring it could change answers")


def _temperature_buckets(fields: Fields) -> tuple[tuple[int | None, float], ...]:
    name = "temperature_by_questions"
    if fields.values.get(name) is None:
        return ()
    section = fields.section(name).values
    bounds, temperatures = section.get("max_questions"), section.get("temperature")
    if (
        set(section) != {"max_questions", "temperature"}
        or not isinstance(bounds, list)
        or not isinstance(temperatures, list)
        or len(temperatures) != len(bounds) + 1
        or any(type(bound) is not int for bound in bounds)
        or bounds != sorted(set(bounds))
        or not all(map(is_positive, temperatures))
    ):
        raise fields.refuse(
            name, "expected rising max_questions and one positive temperature more than bounds"
        )
    return tuple(zip([*bounds, None], map(float, temperatures), strict=True))


def read_geometry(config: Fields) -> Geometry:
    """Understand the text geometry of `config.json`.

    Raises:
        InvalidCheckpoint: not a Qwen3.5 text backbone, or a variant of it that the backbone does not compute.
    """
    config.one_of("model_type", "qwen3_5")
    text = config.section("text_config")
    text.one_of("model_type", "qwen3_5_text")
    text.one_of("hidden_act", "silu", default="silu")
    text.one_of("attention_bias", False, default=False)
    text.one_of("attn_output_gate", True, default=True)
    geometry = Geometry(
        vocab_size=text.integer("vocab_size"),
        hidden=text.integer("hidden_size"),
        ffn=text.integer("intermediate_size"),
        layer_types=_layer_types(text),
        heads=text.integer("num_attention_heads"),
        kv_heads=text.integer("num_key_value_heads"),
        head_dim=text.integer("head_dim"),
        linear_key_heads=text.integer("linear_num_key_heads"),
        linear_value_heads=text.integer("linear_num_value_heads"),
        linear_key_dim=text.integer("linear_key_head_dim"),
        linear_value_dim=text.integer("linear_value_head_dim"),
        conv_width=text.integer("linear_conv_kernel_dim", least=2),
        eps=text.positive("rms_norm_eps"),
        max_positions=text.integer("max_position_embeddings"),
        **_rope(text),
    )
    for total, part in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if text.integer(total) % text.integer(part):
            raise text.refuse(total, f"expected a multiple of {part}")
    return geometry


def _layer_types(text: Fields) -> tuple[LayerType, ...]:
    """Read the order of layers as written: small checkpoints do not follow `full_attention_interval`."""
    layer_types: tuple[LayerType, ...] = text.list_of("layer_types", str, text.integer("num_hidden_layers"))
    unknown = set(layer_types) - {"linear_attention", "full_attention"}
    if unknown:
        raise text.refuse("layer_types", f"{sorted(unknown)[0]!r} is no kind of layer that we know")
    return layer_types


def _rope(text: Fields) -> dict[str, Any]:
    if text.values.get("rope_scaling"):  # transformers would read it instead of rope_parameters
        raise text.refuse("rope_scaling", "expected rope_parameters alone")
    rope = text.section("rope_parameters")
    rope.one_of("rope_type", "default", default="default")
    share = rope.values.get("partial_rotary_factor", text.values.get("partial_rotary_factor", 0.25))
    if not is_positive(share) or share > 1:
        raise rope.refuse("partial_rotary_factor", "expected a number above 0 and at most 1")
    return {"rotary_dim": int(text.integer("head_dim") * share), "rope_theta": rope.positive("rope_theta")}
