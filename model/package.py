"""A package as one object: what its files say about it, each read and understood once, before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from d3serve.model.compressed import Scheme, read_scheme
from d3serve.model.config import DecisionConfig, Geometry, read_decision, read_geometry
from d3serve.model.fields import Fields
from d3serve.model.media import MediaKind
from d3serve.model.shards import INDEX, backbone_files
from d3serve.model.vision_config import VisionGeometry, read_vision

CONFIG = "config.json"
DECISION = "decision_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MANIFEST = "MODEL_MANIFEST.json"
PROCESSORS: Mapping[MediaKind, str] = {
    "image": "preprocessor_config.json",
    "video": "video_preprocessor_config.json",
}


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
    config: Fields
    processors: Mapping[MediaKind, Fields]  # those that are there

    def vision(self) -> VisionGeometry | None:
        """The vision tower that the configuration describes; None where it is of text alone.

        Raises:
            InvalidCheckpoint: as `read_vision`.
        """
        return read_vision(self.config, self.geometry, self.processors)


def open_package(folder: Path, *, any_layout: bool = False) -> Package:
    """Read and understand a package's configuration, index and manifest; its weights stay where they are.

    Args:
        folder: the package.
        any_layout: take a prompt layout that is not ours, for the package's own code to render.

    Raises:
        InvalidCheckpoint: a file is missing or damaged, or says what we do not know; the message names it.
    """
    config = Fields.read(folder / CONFIG)
    processors = {kind: Fields.read_if_there(folder / name) for kind, name in PROCESSORS.items()}
    return Package(
        folder=folder,
        geometry=read_geometry(config),
        scheme=read_scheme(config),
        decision=read_decision(Fields.read(folder / DECISION), any_layout=any_layout),
        weight_files=backbone_files(folder, Fields.read_if_there(folder / INDEX)),
        tokenizer_config=Fields.read_if_there(folder / TOKENIZER_CONFIG),
        manifest=Fields.read_if_there(folder / MANIFEST),
        config=config,
        processors={kind: fields for kind, fields in processors.items() if fields is not None},
    )
