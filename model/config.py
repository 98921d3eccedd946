"""What a package says about itself: `decision_config.json` and the text geometry of `config.json`.

Whatever would change an answer is read and understood, or refused with the field and its value.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from d3serve.errors import InvalidCheckpoint
from d3serve.model.registry import NO_PUBLIC_LAYOUT

AttentionMode = Literal["prefix_bidir", "causal", "noncausal_full_attention"]
LayerType = Literal["linear_attention", "full_attention"]

ATTENTION_MODES: tuple[AttentionMode, ...] = ("prefix_bidir", "causal", "noncausal_full_attention")
FORMAT_VERSION = 1
FORMAT_ID = "d3-code-readout-v1"
CODES = 255
LARGEST_INTEGER = 2**31 - 1  # no size, length or id of a model comes near
LEAST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30  # FP32 divides by these and stays finite

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


class Fields:
    """Typed access to one JSON file; every refusal names the file, the field and the value."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def refuse(self, name: str, expected: str) -> InvalidCheckpoint:
        """An error that names the file, the field and its value, to be raised."""
        shown = json.dumps(self.values.get(name), ensure_ascii=False, default=str)
        return InvalidCheckpoint(f"{self.source}: {name} is {shown[:200]}; {expected}", field=name)

    def integer(self, name: str, *, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= LARGEST_INTEGER:  # a bool is an int to isinstance
            raise self.refuse(name, f"expected an integer of at least {least}")
        return value

    def optional_integer(self, name: str, *, least: int) -> int | None:
        """The same; null and a missing field are None."""
        return None if self.values.get(name) is None else self.integer(name, least=least)

    def positive(self, name: str) -> float:
        """A number above 0 that FP32 can compute with."""
        value = self.values.get(name)
        if not _is_positive(value):
            raise self.refuse(name, "expected a number from 1e-30 to 1e30")
        return float(cast("float", value))

    def one_of(self, name: str, *allowed: Any, default: Any = ...) -> Any:
        """One of the allowed values, of the same type; `default` stands for a missing field."""
        value = self.values.get(name, default)
        if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
            raise self.refuse(name, "expected " + " or ".join(json.dumps(each) for each in allowed))
        return value

    def list_of(self, name: str, kind: type, length: int) -> tuple[Any, ...]:
        """A list of `length` values of one type."""
        value = self.values.get(name)
        if (
            not isinstance(value, list)
            or len(value) != length
            or any(type(item) is not kind for item in value)
        ):
            raise self.refuse(name, f"expected {length} values of type {kind.__name__}")
        return tuple(value)

    def section(self, name: str) -> "Fields":
        """An object within the object."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.refuse(name, "expected an object")
        return Fields(value, f"{self.source}: {name}")


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and LEAST_NUMBER <= cast("float", value) <= LARGEST_NUMBER


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object of a package.

    Raises:
        InvalidCheckpoint: the file is missing, or is no JSON object.
    """
    if path.exists() and not path.is_file():  # opening a FIFO would wait for ever
        raise InvalidCheckpoint(f"{path.name} is no regular file", field=path.name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(
            values, ensure_ascii=False
        ).encode()  # JSON can spell half a character; no name or text may be one
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{path.name} is missing from {path.parent}", field=path.name) from None
    except (ValueError, RecursionError, OSError) as error:
        raise InvalidCheckpoint(f"{path.name} cannot be read: {error}", field=path.name) from None
    if not isinstance(values, dict):
        raise InvalidCheckpoint(f"{path.name} is no JSON object", field=path.name)
    return values


def load_decision_config(folder: Path, *, any_layout: bool = False) -> DecisionConfig:
    """Read `decision_config.json`; `any_layout` leaves it to the package's own code to render the layout.

    Raises:
        InvalidCheckpoint: a value, or a field that could change answers, is not one that we know.
    """
    fields = Fields(read_json(folder / "decision_config.json"), "decision_config.json")
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
        or not all(map(_is_positive, temperatures))
    ):
        raise fields.refuse(
            name, "expected rising max_questions and one positive temperature more than bounds"
        )
    return tuple(zip([*bounds, None], map(float, temperatures), strict=True))


def load_geometry(folder: Path) -> Geometry:
    """Read the text geometry of `config.json`.

    Raises:
        InvalidCheckpoint: not a Qwen3.5 text backbone, or a variant of it that the backbone does not compute.
    """
    config = Fields(read_json(folder / "config.json"), "config.json")
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
    if not _is_positive(share) or share > 1:
        raise rope.refuse("partial_rotary_factor", "expected a number above 0 and at most 1")
    return {"rotary_dim": int(text.integer("head_dim") * share), "rope_theta": rope.positive("rope_theta")}
