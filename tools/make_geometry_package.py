"""Write a package of d3-turbo's geometry, vision tower included, and the published vocabulary, without weights.

    python tools/make_geometry_package.py FOLDER

For `D3SERVE_LOAD_FORMAT=random`: speed and memory at full size, with token counts as in production.
"""

import argparse
from itertools import islice
from pathlib import Path

from make_tiny_checkpoint import PROCESSORS, write_json, write_manifest, write_tokenizer
from published_vocabulary import published_special_tokens, published_vocabulary
from tokenizers import Tokenizer

from d3serve.model.tokenizer import answer_codes

TEXT_CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "attn_output_gate": True,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}

VISION_CONFIG = {
    "model_type": "qwen3_5_vision",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": TEXT_CONFIG["hidden_size"],
    "num_position_embeddings": 2304,
}
CONTROL = {
    "image": "image_pad",
    "video": "video_pad",
    "vision_start": "vision_start",
    "vision_end": "vision_end",
}


def write_package(folder: Path) -> None:
    """Write everything but the weights into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab, merges = published_vocabulary()
    special = published_special_tokens(len(vocab))
    write_tokenizer(folder, vocab, merges, special, "Qwen2Tokenizer")
    codes = list(islice(answer_codes(Tokenizer.from_file(str(folder / "tokenizer.json"))), 255))
    config = {"model_type": "qwen3_5", "text_config": TEXT_CONFIG, "vision_config": VISION_CONFIG}
    tokens = {f"{name}_token_id": special[f"<|{token}|>"] for name, token in CONTROL.items()}
    write_json(folder / "config.json", config | tokens)
    for name, values in PROCESSORS.items():
        write_json(folder / name, values)
    write_json(
        folder / "decision_config.json",
        {
            "format_version": 1,
            "format_id": "d3-code-readout-v1",
            "prompt": "d3",
            "codes": [code for code, _ in codes],
            "token_ids": [token for _, token in codes],
            "temperature": 1.0,
            "attention_mode": "prefix_bidir",
            "pooling": "last",
            "max_length": None,
            "validated_length": 32_768,
        },
    )
    write_manifest(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write_package(parser.parse_args().folder)
