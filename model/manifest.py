"""Checks a package against its own manifest and says what it is, without loading it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from d3serve.model.fields import Fields
from d3serve.model.package import MANIFEST, Package, open_package
from d3serve.model.shards import DRAFT_HEAD, READOUT, VISION, tensor_sizes

SCHEMA = "d3-package-manifest/1"
BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class PackageReport:
    """What a package says it is, and everything about it that is not as it says."""

    attention_mode: str
    prompt_layout: str | None
    weights: str
    layers: str
    hidden: int
    validated_length: int | None
    parameters: dict[str, int]
    files_checked: int
    problems: tuple[str, ...]


def check_package(folder: Path) -> PackageReport:
    """Hash every file that the manifest lists, count the parameters and compare both.

    Raises:
        InvalidCheckpoint: the package cannot be described at all: its configuration is refused, or a
            weights file is missing or damaged. What merely differs from the manifest is in `problems`.
    """
    package = open_package(folder, any_layout=True)
    config, geometry = package.decision, package.geometry
    parameters = _count_parameters(package)
    manifest = package.manifest or Fields.read(folder / MANIFEST)  # which refuses that there is none
    digests = manifest.section("files_sha256").values
    full, linear = geometry.full_layers, geometry.linear_layers
    problems = tuple(_problems(folder, manifest, parameters))
    return PackageReport(
        attention_mode=config.attention_mode,
        prompt_layout=config.prompt_layout,
        weights=package.scheme.kind,
        layers=f"{full + linear} ({linear} linear, {full} full attention)",
        hidden=geometry.hidden,
        validated_length=config.validated_length,
        parameters=parameters,
        files_checked=len(digests),
        problems=problems,
    )


def _problems(folder: Path, manifest: Fields, parameters: dict[str, int]) -> Iterator[str]:
    schema = manifest.values.get("schema")
    if schema != SCHEMA:
        yield f"{MANIFEST}: schema is {schema!r}; this version knows {SCHEMA}"
    digests, sizes, stated = (
        manifest.section(name).values if name in manifest.values else {}
        for name in ("files_sha256", "files_bytes", "parameters")
    )
    for name, expected in digests.items():
        yield from _file_problems(folder, name, sizes.get(name), expected)
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in digests:
            yield f"{path.name}: is not in the manifest"
    for part, number in stated.items():
        if part in parameters and parameters[part] != number:
            yield f"parameters: {part} has {parameters[part]:,}; the manifest says {number!r}"


def _file_problems(folder: Path, name: str, size: object, digest: object) -> Iterator[str]:
    path = folder / name
    if Path(name).name != name:
        yield f"{name}: lies outside the package"
    elif not path.is_file():
        yield f"{name}: is missing"
    elif size is not None and path.stat().st_size != size:
        yield f"{name}: has {path.stat().st_size} bytes; the manifest says {size}"
    elif (found := _sha256(path)) != digest:
        yield f"{name}: has SHA-256 {found}; the manifest says {digest}"


def _count_parameters(package: Package) -> dict[str, int]:
    """Parameters by part, from the headers of the weights files alone."""
    counts = {"text": 0, "vision": 0, "readout": 0, "loaded": 0}
    for path in package.weight_files:
        for name, numbers in tensor_sizes(path):
            if not name.startswith(DRAFT_HEAD):
                counts["vision" if name.startswith(VISION) else "text"] += numbers
    counts["readout"] = sum(numbers for _, numbers in tensor_sizes(package.folder / READOUT))
    counts["loaded"] = sum(counts.values())
    return counts


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
