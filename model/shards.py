"""The safetensors files of a package: which there are, what is in them, one tensor at a time."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from d3serve.errors import InvalidCheckpoint
from d3serve.model.fields import Fields, refuse_irregular
from d3serve.model.staging import Staging

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
READOUT = "readout.safetensors"
DRAFT_HEAD = "mtp."
VISION = ("visual.", "model.visual.", "language_model.visual.", "model.language_model.visual.")
HEADER_LENGTH_BYTES = 8
TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}  # what weights, scales, packed words and shapes are stored as
TEXT = ("model.language_model.", "language_model.model.", "language_model.")


def backbone_files(folder: Path, index: Fields | None) -> tuple[Path, ...]:
    """List the backbone's files: all that the index names, or the single one of a package without an index.

    Raises:
        InvalidCheckpoint: the index is malformed, or names a file outside the package.
    """
    if index is None:
        return (folder / SINGLE,)
    weight_map = index.values.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise InvalidCheckpoint(f"{INDEX}: weight_map is no object of file names", field="weight_map")
    names = sorted(set(weight_map.values()) - {READOUT})
    for name in names:
        if Path(name).name != name:
            raise InvalidCheckpoint(
                f"{INDEX} names {name!r}, which is outside the package", field="weight_map"
            )
    return tuple(folder / name for name in names)


def text_name(stored: str) -> str | None:
    """Give the backbone's name of a stored tensor; None for the draft head and the vision tower."""
    if stored.startswith((DRAFT_HEAD, *VISION)):
        return None
    prefix = next((each for each in TEXT if stored.startswith(each)), "")
    return stored.removeprefix(prefix)


def vision_name(stored: str) -> str | None:
    """Give the vision tower's name of a stored tensor; None for all else."""
    prefix = next((each for each in VISION if stored.startswith(each)), None)
    return None if prefix is None else stored.removeprefix(prefix)


def hold_tower(files: Iterable[Path]) -> bool:
    """Whether any tensor of these files belongs to a vision tower."""
    return any(vision_name(stored) is not None for path in files for stored, _ in tensor_sizes(path))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    refuse_irregular(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{path.name} is missing from {path.parent}", field=path.name) from None
    except OSError as error:
        raise InvalidCheckpoint(f"{path.name} cannot be read: {error}", field=path.name) from None
    except (SafetensorError, EOFError) as error:
        raise InvalidCheckpoint(f"{path.name} is damaged: {error}", field=path.name) from None


def named_tensors(
    path: Path,
    device: torch.device,
    name_of: Callable[[str], str | None] = text_name,
    *,
    share: int = 0,
    shares: int = 1,
) -> Iterator[tuple[str, str, Tensor]]:
    """Read the tensors of one file that `name_of` gives a name, or one of `shares` of them.

    Yields:
        (name in the file, the name given, tensor on `device`), one tensor at a time.

    Raises:
        InvalidCheckpoint: the file is missing or damaged, or a tensor is of a type that no package holds.
    """
    with _opened(path) as file:
        names = {stored: name for stored in file.offset_keys() if (name := name_of(stored)) is not None}
        wanted = list(names)[share::shares]
        mapped = device.type != "cuda"
        tensors = map(file.get_tensor, wanted) if mapped else staged_tensors(path, wanted, device)
        for stored, tensor in zip(wanted, tensors, strict=True):
            yield stored, names[stored], tensor


def staged_tensors(path: Path, names: Sequence[str], device: torch.device) -> Iterator[Tensor]:
    """Read tensors of a file whose header the library has checked, through pinned memory."""
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(HEADER_LENGTH_BYTES), "little")
        header = json.loads(raw.read(length))
    with Staging(path, device) as staging:
        for name in names:
            kind, shape = header[name]["dtype"], header[name]["shape"]
            if kind not in TYPES:
                raise InvalidCheckpoint(
                    f"{path.name}: tensor {name} is {kind}, which no package holds", field=name
                )
            begin, end = (HEADER_LENGTH_BYTES + length + offset for offset in header[name]["data_offsets"])
            yield staging.read(begin, end).view(TYPES[kind]).view(shape)


def stored_types(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the backbone's names of the tensors of one file, and the format's name of their type."""
    with _opened(path) as file:
        for stored in file.keys():  # noqa: SIM118
            name = text_name(stored)
            if name is not None:
                yield name, file.get_slice(stored).get_dtype()


def tensor_sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each tensor's name in the file and its number of elements, from the header alone."""
    with _opened(path) as file:
        for stored in file.keys():  # noqa: SIM118
            yield stored, torch.Size(file.get_slice(stored).get_shape()).numel()
