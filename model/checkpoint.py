"""From a package folder or a Hub id to weights on the device."""

from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from d3serve.errors import InvalidCheckpoint
from d3serve.model.config import CODES, Geometry, read_json
from d3serve.model.weights import Allocator, Weights

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
READOUT = "readout.safetensors"
NEEDED_FILES = ("*.safetensors", "*.json", "*.jinja")  # no code: nothing of a package is executed
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")
# Known parts that a text-only pass does not read: the vision tower and the draft head.
UNREAD_PREFIXES = (
    "mtp.",
    "visual.",
    "model.visual.",
    "language_model.visual.",
    "model.language_model.visual.",
)


def locate(model: str, revision: str | None) -> Path:
    """Return the folder of a package: `model` itself when it is one, else a snapshot of that Hub id.

    Raises:
        InvalidCheckpoint: neither a folder nor a repository (or revision) that can be downloaded.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(NEEDED_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        reason = str(error).strip().splitlines()[0]
        message = f"{model!r} is no folder here and no repository{at} that can be downloaded: {reason}"
        raise InvalidCheckpoint(message, field="model") from None


def load_weights(folder: Path, geometry: Geometry, device: torch.device, dtype: torch.dtype) -> Weights:
    """Stream the package's tensors into fused parameters on `device`; matrices become `dtype`.

    Norms, A_log, dt_bias and the readout are FP32 whatever `dtype` is.

    Raises:
        InvalidCheckpoint: a tensor is missing, unknown, doubled, or of another shape than the geometry says.
    """
    allocator = Allocator(geometry, device, dtype)
    weights = allocator.weights(CODES)
    missing = dict(allocator.targets)
    for shard in _shards(folder):
        for stored, tensor in _tensors(shard, device):
            name = _text_name(stored)
            if name is None:
                continue
            if name not in missing:
                doubled = name in allocator.targets
                raise _refused(shard, stored, "is there twice" if doubled else "is not part of this geometry")
            _fill(missing.pop(name), tensor, shard, stored)
    if missing:
        first, more = next(iter(missing)), len(missing) - 1
        raise InvalidCheckpoint(
            f"{folder}: tensor {first} is missing" + (f" and {more} more" if more else "")
        )
    _load_readout(folder / READOUT, weights.readout)
    return weights


def _load_readout(path: Path, target: Tensor) -> None:
    tensors = dict(_tensors(path, target.device))
    if set(tensors) != {"weight"}:
        raise InvalidCheckpoint(f"{path.name} holds {sorted(tensors)}; expected one tensor named weight")
    if tensors["weight"].dtype != torch.float32:
        raise _refused(path, "weight", f"is {tensors['weight'].dtype}; a readout is FP32")
    _fill(target, tensors["weight"], path, "weight")


def _fill(target: Tensor, tensor: Tensor, shard: Path, name: str) -> None:
    if target.shape != tensor.shape:
        raise _refused(shard, name, f"has shape {list(tensor.shape)}; config.json says {list(target.shape)}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise _refused(shard, name, f"is {tensor.dtype}; expected a floating-point type of 16 or 32 bits")
    target.copy_(tensor)


def _shards(folder: Path) -> list[Path]:
    """List the backbone's safetensors files: all that the index names, or the single one."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InvalidCheckpoint(f"{INDEX}: weight_map is no object of file names", field="weight_map")
        names = sorted(set(weight_map.values()) - {READOUT})
    else:
        names = [SINGLE]
    for name in names:
        if Path(name).name != name:
            raise InvalidCheckpoint(
                f"{INDEX} names {name!r}, which is outside the package", field="weight_map"
            )
    return [folder / name for name in names]


def _tensors(path: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of one file, one at a time, read straight to `device`."""
    if not path.is_file():
        raise InvalidCheckpoint(f"{path.name} is missing from {path.parent}", field=path.name)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise InvalidCheckpoint(f"{path.name} is damaged: {error}", field=path.name) from None


def _text_name(stored: str) -> str | None:
    """Give the backbone's name of a stored tensor; None for the parts that a text-only pass does not read."""
    if stored.startswith(UNREAD_PREFIXES):
        return None
    for prefix in TEXT_PREFIXES:
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return stored


def _refused(shard: Path, name: str, reason: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"{shard.name}: tensor {name} {reason}", field=name)
