"""Writes a trained tower into a package of text, of which no tensor and no answer changes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.looking import TOWER
from make_tiny_checkpoint import PROCESSORS, write_json, write_manifest
from safetensors.torch import load_file, save_file
from torch import Tensor

from d3serve.model.media_prompt import NAMES

IMAGES = "preprocessor_config.json"  # no file for videos: the package then takes none
TOKENS = {
    "image": "image_token_id",
    "video": "video_token_id",
    "start": "vision_start_token_id",
    "end": "vision_end_token_id",
}


def write_tower(source: Path, tower: Mapping[str, Tensor], folder: Path) -> None:
    """Write the package at `source` with a tower, in its place if `folder` is the same; the card is left to others."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.suffix != ".safetensors"}
    readout = load_file(source / "readout.safetensors")
    tensors = load_file(source / "model.safetensors")
    texts = {name: p for name, p in tensors.items() if not name.startswith("visual.")}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    save_file(texts | dict(tower), folder / "model.safetensors", metadata={"format": "pt"})
    save_file(readout, folder / "readout.safetensors", metadata={"format": "pt"})
    config = json.loads(files["config.json"])
    write_json(folder / "config.json", config | {"vision_config": _vision_config()} | _token_ids(files))
    write_json(folder / IMAGES, PROCESSORS[IMAGES])
    write_manifest(folder)


def _vision_config() -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_vision",
        "depth": TOWER.depth,
        "hidden_size": TOWER.hidden,
        "intermediate_size": TOWER.ffn,
        "num_heads": TOWER.heads,
        "out_hidden_size": TOWER.out_hidden,
        "num_position_embeddings": TOWER.side**2,
    }


def _token_ids(files: Mapping[str, bytes]) -> dict[str, int]:
    """The control tokens of media, as the package's tokenizer numbers them."""
    added = {token["content"]: token["id"] for token in json.loads(files["tokenizer.json"])["added_tokens"]}
    return {field: added[NAMES[name]] for name, field in TOKENS.items()}
