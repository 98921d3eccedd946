"""Write a small checkpoint in the real package format, the same bytes every time.

    python tools/make_tiny_checkpoint.py FOLDER

Its answers mean nothing; its mechanics are real: both kinds of layers in an irregular order, grouped query
heads, a byte-level tokenizer with the Qwen pre-tokenizer and special tokens, 255 single-token codes. Weights
are random but strong, so that a wrong mask, position or state moves probabilities far beyond any tolerance.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_tower import draw_tower, vision_config
from torch import Tensor

LAYERS = ("linear", "full", "linear", "linear", "full", "linear")
HIDDEN, FFN = 128, 256
HEADS, KV_HEADS, HEAD_DIM = 12, 2, 32
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, CONV_WIDTH = 2, 4, 32, 4
CHANNELS = 2 * KEY_HEADS * LINEAR_DIM + VALUE_HEADS * LINEAR_DIM
CODES = 255

# Words that become tokens of their own, with and without a space before them.
WORDS = """
the of and to in is are was for on that with as by it be not this from or at an have has you your we our can
will State Question Options Reply only code best option Choose matching Read every then data instructions
system user assistant decision engine Treat empty Yes No true false null customer order refund payment card
charged twice ticket email address delivery late broken please thanks account invoice urgent angry happy
low medium high priority billing shipping technical other language text document page number date name
"""
# Runs that join a state's last character to the newlines after it, as in the real vocabulary.
ENDINGS = (".", "}", "]", "?", "!", ")", '"', '"}', ">", " ", "")
JOINED = (*(ending + "\n\n" for ending in ENDINGS), ":\n", "  ", '": "', '", "')
SPECIAL_TOKENS = """
<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
"""
ADDED_TOKENS = """
<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
<tool_response> </tool_response> <think> </think>
"""
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{ '\\n</think>\\n\\n' }}
{%- endif -%}
{%- endif -%}
"""


PROCESSORS = {
    "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"},
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor"},
}


@dataclass(frozen=True)
class Variant:
    """What differs between packages of the family."""

    attention_mode: str = "prefix_bidir"
    layers: tuple[str, ...] = LAYERS
    shards: int = 1
    prefix: str = "language_model."
    tokenizer_class: str = "Qwen2Tokenizer"
    extras: bool = False  # tensors that a text-only pass does not read: draft head and vision tower
    processors: tuple[str, ...] = ("preprocessor_config.json", "video_preprocessor_config.json")
    decision: tuple[tuple[str, Any], ...] = ()  # fields of decision_config.json to set
    seed: int = 20_260_919


def write_checkpoint(folder: Path, variant: Variant | None = None) -> Path:
    """Write the package of `variant` into `folder`, which is made if needed; return the folder."""
    variant = variant or Variant()
    folder.mkdir(parents=True, exist_ok=True)
    vocab, merges = _vocabulary()
    added = {token: len(vocab) + index for index, token in enumerate((SPECIAL_TOKENS + ADDED_TOKENS).split())}
    codes = list(islice(_codes(), CODES))
    write_tokenizer(folder, vocab, merges, added, variant.tokenizer_class)
    write_json(folder / "config.json", _config(len(vocab) + len(added), added, variant.layers))
    write_json(folder / "decision_config.json", _decision_config(codes, vocab, variant))
    for name in variant.processors:
        write_json(folder / name, PROCESSORS[name])
    _write_weights(folder, len(vocab) + len(added), variant)
    write_manifest(folder)
    return folder


# --- tokenizer -------------------------------------------------------------------------------------


def byte_alphabet() -> dict[int, str]:
    """Map every byte to its printable stand-in, as byte-level BPE has written it since GPT-2."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


def _codes() -> Iterable[str]:
    yield from ascii_uppercase
    yield from map("".join, product(ascii_uppercase, repeat=2))


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes first, then one token for each step of spelling out the codes, the runs and the words."""
    alphabet = byte_alphabet()
    vocab = {symbol: index for index, symbol in enumerate(alphabet[byte] for byte in range(256))}
    merges: list[tuple[str, str]] = []
    spaced = [form for word in WORDS.split() for form in (word, " " + word)]
    for text in (*islice(_codes(), CODES), *JOINED, *spaced):
        symbols = [alphabet[byte] for byte in text.encode()]
        for end in range(2, len(symbols) + 1):
            left, right = "".join(symbols[: end - 1]), symbols[end - 1]
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    return vocab, merges


def write_tokenizer(
    folder: Path,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    added: dict[str, int],
    tokenizer_class: str,
) -> None:
    """Write the tokenizer's files and the chat template; `added` are the control tokens with their ids."""
    entries = {
        str(index): _added_token(token, special=token in SPECIAL_TOKENS.split())
        for token, index in added.items()
    }
    write_json(folder / "tokenizer.json", _tokenizer(vocab, merges, entries))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": tokenizer_class,
            "added_tokens_decoder": entries,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "model_max_length": 262_144,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _tokenizer(
    vocab: dict[str, int], merges: list[tuple[str, str]], entries: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
    }
    model |= {
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": int(index), **entry} for index, entry in entries.items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model,
    }


def _added_token(token: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": token, **flags, "special": special}


# --- configuration ---------------------------------------------------------------------------------


def _config(vocab_size: int, added: dict[str, int], layers: Sequence[str]) -> dict[str, Any]:
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": len(layers),
        "layer_types": [f"{kind}_attention" for kind in layers],
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_conv_kernel_dim": CONV_WIDTH,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
    }
    return {
        "architectures": ["Qwen3_5Model"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "image_token_id": added["<|image_pad|>"],
        "video_token_id": added["<|video_pad|>"],
        "vision_start_token_id": added["<|vision_start|>"],
        "vision_end_token_id": added["<|vision_end|>"],
        "text_config": text,
        "vision_config": vision_config(HIDDEN),
    }


def _decision_config(codes: Sequence[str], vocab: dict[str, int], variant: Variant) -> dict[str, Any]:
    return {
        "format_version": 1,
        "format_id": "d3-code-readout-v1",
        "prompt": "d3",
        "codes": list(codes),
        "token_ids": [vocab[code] for code in codes],
        "temperature": 0.75,
        "attention_mode": variant.attention_mode,
        "pooling": "last",
        "max_length": None,
        "readout_dtype": "float32",
        "validated_length": 32_768,
        "base_model": "tiny",
        "revision": "0",
    } | dict(variant.decision)


# --- weights ---------------------------------------------------------------------------------------


class _Draw:
    """Draws parameters in a fixed order from one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator)
        return (drawn * std + mean).to(torch.bfloat16)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return self.normal(rows, columns, std=gain * columns**-0.5)

    def uniform(self, size: int, low: float, high: float) -> Tensor:
        return torch.rand(size, generator=self._generator) * (high - low) + low


def _backbone(vocab_size: int, layers: Sequence[str], draw: _Draw) -> dict[str, Tensor]:
    tensors = {"embed_tokens.weight": draw.normal(vocab_size, HIDDEN, std=1.0)}
    for index, kind in enumerate(layers):
        prefix = f"layers.{index}."
        mixer = _full_attention(draw) if kind == "full" else _linear_attention(draw)
        tensors |= {prefix + name: tensor for name, tensor in mixer.items()}
        tensors |= {
            prefix + "mlp.gate_proj.weight": draw.matrix(FFN, HIDDEN, gain=1.5),
            prefix + "mlp.up_proj.weight": draw.matrix(FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": draw.matrix(HIDDEN, FFN),
            prefix + "input_layernorm.weight": draw.normal(HIDDEN, std=0.1),
            prefix + "post_attention_layernorm.weight": draw.normal(HIDDEN, std=0.1),
        }
    return tensors | {"norm.weight": draw.normal(HIDDEN, std=0.1)}


def _full_attention(draw: _Draw) -> dict[str, Tensor]:
    """Sharp attention: query and key norms of 1.7 give scores of a standard deviation near 3."""
    return {
        "self_attn.q_proj.weight": draw.matrix(2 * HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": draw.matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": draw.matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": draw.matrix(HIDDEN, HEADS * HEAD_DIM, gain=3.0),
        "self_attn.q_norm.weight": draw.normal(HEAD_DIM, std=0.1, mean=0.7),
        "self_attn.k_norm.weight": draw.normal(HEAD_DIM, std=0.1, mean=0.7),
    }


def _linear_attention(draw: _Draw) -> dict[str, Tensor]:
    """Long memory: decays near exp(-0.03) a token, so that a state's start still reaches the question."""
    values = VALUE_HEADS * LINEAR_DIM
    return {
        "linear_attn.in_proj_qkv.weight": draw.matrix(CHANNELS, HIDDEN),
        "linear_attn.in_proj_z.weight": draw.matrix(values, HIDDEN),
        "linear_attn.in_proj_b.weight": draw.matrix(VALUE_HEADS, HIDDEN),
        "linear_attn.in_proj_a.weight": draw.matrix(VALUE_HEADS, HIDDEN, gain=0.5),
        "linear_attn.conv1d.weight": draw.normal(CHANNELS, 1, CONV_WIDTH, std=0.6),
        "linear_attn.A_log": draw.uniform(VALUE_HEADS, 0.5, 4.0).log(),
        "linear_attn.dt_bias": draw.uniform(VALUE_HEADS, -6.0, -3.0),
        "linear_attn.norm.weight": draw.normal(LINEAR_DIM, std=0.1, mean=1.0),
        "linear_attn.out_proj.weight": draw.matrix(HIDDEN, values, gain=1.5),
    }


def _write_weights(folder: Path, vocab_size: int, variant: Variant) -> None:
    draw = _Draw(variant.seed)
    tensors = {
        variant.prefix + name: tensor for name, tensor in _backbone(vocab_size, variant.layers, draw).items()
    }
    readout = draw.normal(CODES, HIDDEN, std=3.0 * HIDDEN**-0.5).float()
    if variant.extras:
        tensors["mtp.norm.weight"] = draw.normal(HIDDEN, std=0.1)
        tensors |= {"visual." + name: tensor for name, tensor in draw_tower(HIDDEN, variant.seed).items()}
    names = list(tensors)
    if variant.shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        files = [f"model-{i + 1:05}-of-{variant.shards:05}.safetensors" for i in range(variant.shards)]
        for index, file in enumerate(files):
            part = {name: tensors[name] for name in names[index :: variant.shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
        weight_map = {name: files[index % variant.shards] for index, name in enumerate(names)}
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
    save_file({"weight": readout}, folder / "readout.safetensors", metadata={"format": "pt"})


# --- manifest --------------------------------------------------------------------------------------


def write_manifest(folder: Path) -> None:
    """Write the digests and sizes of every other file of the package."""
    files = sorted(path for path in folder.iterdir() if path.name != "MODEL_MANIFEST.json")
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    weights = "".join(digest for name, digest in digests.items() if name.endswith(".safetensors"))
    write_json(
        folder / "MODEL_MANIFEST.json",
        {
            "schema": "d3-package-manifest/1",
            "files_sha256": digests,
            "files_bytes": {path.name: path.stat().st_size for path in files},
            "identity": {"model_sha256": hashlib.sha256(weights.encode()).hexdigest()},
        },
    )


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write one JSON object for people to read."""
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write the default variant into the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Write a small checkpoint in the real package format.")
    parser.add_argument("folder", type=Path)
    folder = write_checkpoint(parser.parse_args().folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
