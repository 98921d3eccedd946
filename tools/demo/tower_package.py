"""Writes a trained tower into a package of text, of which no tensor and no answer changes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.card import LEAD
from demo.looking import TOWER
from demo.pictures import WORDS
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


LEAD_WITH_PICTURES = """\
A small decision model in the Decision 3.0 package format, trained from scratch on descriptions of
Debian packages and on simple drawings. It lets you try, test and show d3serve on a CPU with
meaningful answers. It is no general model: it knows software packages, such drawings and the
questions below, and nothing else.
"""
HEADING = "## Pictures"
CARD = """\
## Pictures

It answers four kinds of choices about simple drawings of one to four equal things on a plain
background: which colour ({colour}), which shape
({shape}), how many (one to four), and, of a single thing,
in which corner. It knows nothing else of pictures, photos least of all.

Measured on {pictures} questions with four options about drawings that it has not seen, of all sizes
from 240 to 400 pixels, through the engine. Half are of the eight pairs of shape and colour that were
never drawn for training. Chance is 25 %. The interval is Wilson's, 95 %. It is right more often than
it says: where confidence is below accuracy, the answer is too modest.

| asked | number | accuracy | interval | mean confidence | NLL | ECE |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

A vision tower of {parameters:.2f} M parameters ({depth} blocks, {hidden} wide) writes word vectors, and
the circuits that answer texts do the rest: none of their weights was changed for it, so texts are
answered as before. `tools/train_demo_tower.py` makes it;
`docs/records/2026-11-30-demo-pictures.md` has commands, times and what it cannot do.
"""


def write_card(folder: Path, results: Mapping[str, Any]) -> None:
    """Put what was measured into the model card, and the card into the manifest."""
    shown = [("all", name) for name in ("all", *WORDS)] + [
        (group, "all") for group in results if group != "all"
    ]
    rows = [_row(group if name == "all" else name, results[group][name]) for group, name in shown]
    told = CARD.format(
        colour=", ".join(WORDS["colour"]), shape=", ".join(WORDS["shape"]), rows="\n".join(rows),
        pictures=results["all"]["all"]["questions"], parameters=TOWER.parameters / 1e6, depth=TOWER.depth,
        hidden=TOWER.hidden,
    )  # fmt: skip
    card = (folder / "README.md").read_text(encoding="utf-8").replace(LEAD, LEAD_WITH_PICTURES)
    before, _, rest = card.partition(HEADING)
    _, heading, after = (
        rest.partition("\n## ") if rest else before.partition("\n## Where the data comes from")
    )
    if not rest:
        before = before.removesuffix(heading + after)
    (folder / "README.md").write_text(f"{before.rstrip()}\n\n{told}{heading}{after}", encoding="utf-8")
    write_manifest(folder)


def _row(title: str, found: Mapping[str, Any]) -> str:
    least, most = found["interval"]
    return (
        f"| {title} | {found['questions']} | {found['accuracy']:.1%} | {least:.1%} to {most:.1%} "
        f"| {found['confidence']:.1%} | {found['nll']:.3f} | {found['ece']:.3f} |"
    )
