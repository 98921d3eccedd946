"""A package as one object: what its files say about it, each read and understood once, before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path

from d3serve.model.compressed import Scheme, read_scheme
from d3serve.model.config import DecisionConfig, Geometry, read_decision, read_geometry
from d3serve.model.fields import Fields
from d3serve.model.shards import INDEX, backbone_files

CONFIG = "config.json"
DECISION = "decision_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MANIFEST = "MODEL_MANIFEST.json"


@dataclass(frozen=True)
class Package:
    """An opened package. Weights are loaded and the tokenizer is built from it; no JSON file is read again.

    `tokenizer_config` and `manifest` are None where there is no such file: whoever needs it says so.
    """

    folder: Path
    decision: DecisionConfig
    geometry: Geometry
    scheme: Scheme
    weight_files: tuple[Path, ...]  # of the backbone
    tokenizer_config: Fields | None
    manifest: Fields | None


def open_package(folder: Path, *, any_layout: bool = False) -> Package:
    """Read and understand a package's configuration, index and manifest; its weights stay where they are.

    Args:
        folder: the package.
        any_layout: take a prompt layout that is not ours, for the package's own code to render.

    Raises:
        InvalidCheckpoint: a file is missing or damaged, or says what we do not know; the message names it.
    """
    config = Fields.read(folder / CONFIG)
    return Package(
        folder=folder,
        geometry=read_geometry(config),
        scheme=read_scheme(config),
        decision=read_decision(Fields.read(folder / DECISION), any_layout=any_layout),
        weight_files=backbone_files(folder, Fields.read_if_there(folder / INDEX)),
        tokenizer_config=Fields.read_if_there(folder / TOKENIZER_CONFIG),
        manifest=Fields.read_if_there(folder / MANIFEST),
    )
