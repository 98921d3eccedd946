"""Writes the trained model as a package of the real format, with what only this checkpoint says about itself."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from demo.vocabulary import load_vocabulary
from make_tiny_checkpoint import write_json, write_manifest
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from d3serve.model.config import CODES, FORMAT_ID, FORMAT_VERSION, Geometry

VOCABULARY_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FLOAT_NAMES = (
    "A_log",
    "dt_bias",
    "norm.weight",
    "layernorm.weight",
    "readout",
)  # few and sensitive: they stay FP32
MAX_POSITIONS = 4096
VALIDATED_TOKENS = 1024
WEIGHTS = "network.safetensors"  # of a run


def geometry(vocab_size: int) -> Geometry:
    """Five layers: words read beside their neighbours, lines gathered, compared with the state, one selected."""
    full, linear = "full_attention", "linear_attention"
    return Geometry(
        vocab_size=vocab_size,
        hidden=256,
        ffn=384,
        layer_types=(linear, linear, full, full, full),  # type: ignore[arg-type]
        heads=4,
        kv_heads=2,
        head_dim=64,
        rotary_dim=32,
        rope_theta=10_000.0,
        linear_key_heads=4,
        linear_value_heads=4,
        linear_key_dim=64,
        linear_value_dim=64,
        conv_width=4,
        eps=1e-6,
        max_positions=MAX_POSITIONS,
    )


def write_package(
    folder: Path, vocabulary: Path, weights: Mapping[str, Tensor], g: Geometry, temperature: float, card: str
) -> None:
    """Write every file of the package; `weights` holds `backbone.*` and `readout`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in VOCABULARY_FILES:
        shutil.copyfile(vocabulary / name, folder / name)
    _, codes, _ = load_vocabulary(vocabulary)
    write_json(folder / "config.json", _config(g))
    write_json(folder / "decision_config.json", _decision_config(codes, temperature))
    tensors = {
        name.replace("backbone.", "language_model.", 1): _stored(name, tensor)
        for name, tensor in weights.items()
        if name.startswith("backbone.")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    readout = {"weight": weights["readout"].float().contiguous()}
    save_file(readout, folder / "readout.safetensors", metadata={"format": "pt"})
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_manifest(folder)


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write a model's tensors as a package stores them."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: _stored(name, p.detach().cpu()) for name, p in model.named_parameters()}, folder / WEIGHTS
    )


def load_weights(folder: Path) -> dict[str, Tensor]:
    """What `save_weights` wrote."""
    return load_file(folder / WEIGHTS)


def _stored(name: str, tensor: Tensor) -> Tensor:
    kept = name.endswith(FLOAT_NAMES)
    return tensor.to(torch.float32 if kept else torch.bfloat16).contiguous()


def _config(g: Geometry) -> dict[str, Any]:
    sections = [g.rotary_dim // 2 - 2 * (g.rotary_dim // 6), g.rotary_dim // 6, g.rotary_dim // 6]
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": g.vocab_size,
        "hidden_size": g.hidden,
        "intermediate_size": g.ffn,
        "num_hidden_layers": len(g.layer_types),
        "layer_types": list(g.layer_types),
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_num_key_heads": g.linear_key_heads,
        "linear_num_value_heads": g.linear_value_heads,
        "linear_key_head_dim": g.linear_key_dim,
        "linear_value_head_dim": g.linear_value_dim,
        "linear_conv_kernel_dim": g.conv_width,
        "hidden_act": "silu",
        "rms_norm_eps": g.eps,
        "max_position_embeddings": g.max_positions,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": g.rope_theta,
            "partial_rotary_factor": g.rotary_dim / g.head_dim,
            "mrope_interleaved": True,
            "mrope_section": sections,
        },
    }
    return {
        "architectures": ["Qwen3_5Model"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "text_config": text,
    }


def _decision_config(codes: list[tuple[str, int]], temperature: float) -> dict[str, Any]:
    if len(codes) != CODES:
        raise ValueError(f"the vocabulary has {len(codes)} codes of one token; {CODES} are needed")
    return {
        "format_version": FORMAT_VERSION,
        "format_id": FORMAT_ID,
        "prompt": "d3",
        "codes": [code for code, _ in codes],
        "token_ids": [index for _, index in codes],
        "temperature": temperature,
        "attention_mode": "prefix_bidir",
        "pooling": "last",
        "max_length": MAX_POSITIONS,
        "readout_dtype": "float32",
        "validated_length": VALIDATED_TOKENS,
        "base_model": "none: trained from scratch on Debian package descriptions",
        "revision": "1",
    }
