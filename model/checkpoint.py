"""From a package folder to weights on the device."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from d3serve.errors import InvalidCheckpoint
from d3serve.model.compressed import Scheme, dequantize, read_scheme
from d3serve.model.config import CODES, Geometry
from d3serve.model.shards import READOUT, backbone_files, text_tensors
from d3serve.model.weights import Allocator, Weights

log = logging.getLogger(__name__)

PARALLEL_SHARDS = 4  # enough to keep a fast disk and the copy to a GPU busy at once


def load_weights(folder: Path, geometry: Geometry, device: torch.device, dtype: torch.dtype) -> Weights:
    """Stream the package's tensors into fused parameters on `device`; matrices become `dtype`.

    Norms, A_log, dt_bias and the readout are FP32 whatever `dtype` is; quantized matrices are unpacked.

    Raises:
        InvalidCheckpoint: a tensor is missing, unknown, doubled, or of another shape than the geometry says.
    """
    started = time.monotonic()
    allocator = Allocator(geometry, device, dtype)
    weights = allocator.weights(CODES)
    loading = _Loading(allocator.targets, read_scheme(folder))
    files = backbone_files(folder)
    with ThreadPoolExecutor(PARALLEL_SHARDS if device.type == "cuda" else 1) as pool:
        for _ in pool.map(lambda path: loading.read(path, device), files):
            pass
    loading.finish(folder)
    _load_readout(folder / READOUT, weights.readout)
    seconds = time.monotonic() - started
    size = sum(path.stat().st_size for path in files)
    log.info("read %.2f GB in %.1f s: %.2f GB/s", size / 1e9, seconds, size / 1e9 / seconds)
    return weights


def require_memory(geometry: Geometry, dtype: torch.dtype, *, free_bytes: int) -> None:
    """Refuse weights that the device cannot hold, before any is read.

    Raises:
        InvalidCheckpoint: the message holds both sizes.
    """
    allocator = Allocator(geometry, torch.device("meta"), dtype)
    needed = allocator.weights(CODES).readout.nbytes + sum(each.nbytes for each in allocator.targets.values())
    if needed > free_bytes:
        raise InvalidCheckpoint(
            f"the weights need {needed / 1e9:.1f} GB of device memory in {dtype}; {free_bytes / 1e9:.1f} GB are free"
        )


class _Loading:
    """Fills targets with what files hold, each exactly once, in any order and from several threads."""

    def __init__(self, targets: dict[str, Tensor], scheme: Scheme) -> None:
        self._targets = targets
        self._missing = dict(targets)
        self._scheme = scheme
        self._lock = Lock()
        self._parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)

    def read(self, path: Path, device: torch.device) -> None:
        """Read one file. A quantized module is unpacked once its last part has come."""
        for stored, name, tensor in text_tensors(path, device):
            if (module := self._module(name, tensor)) is not None:
                if parts := self._collect(module, name.removeprefix(module), tensor):
                    self._unpack(module, parts, path)
            elif (target := self._missing.pop(name, None)) is not None:
                _fill(target, tensor, path, stored)
            else:
                doubled = name in self._targets
                raise _refused(path, stored, "is there twice" if doubled else "is not part of this geometry")

    def finish(self, folder: Path) -> None:
        """Refuse what is still missing."""
        if self._missing:
            first, more = next(iter(self._missing)), len(self._missing) - 1
            also = f" and {more} more" if more else ""
            raise InvalidCheckpoint(
                f"{folder}: tensor {first} is missing, or a part of it{also}", field=first
            )

    def _module(self, name: str, tensor: Tensor) -> str | None:
        """The prefix of the quantized module that `tensor` is a part of, if it is one."""
        if name.endswith(".weight") and tensor.element_size() > 1:
            return None
        for part in self._scheme.parts:
            module = name.removesuffix(f".{part}") + "."
            if name == module + part and f"{module}weight" in self._missing:
                return module
        return None

    def _collect(self, module: str, part: str, tensor: Tensor) -> dict[str, Tensor] | None:
        """Keep one part; give all of them to whoever brings the last. Parts may lie in different files."""
        with self._lock:
            self._parts[module][part] = tensor
            complete = set(self._parts[module]) == self._scheme.parts
            return self._parts.pop(module) if complete else None

    def _unpack(self, module: str, parts: dict[str, Tensor], path: Path) -> None:
        name = f"{module}weight"
        try:
            weight = dequantize(parts, self._scheme)
        except ValueError as error:
            raise _refused(path, name, f"is packed inconsistently: {error}") from None
        _fill(self._missing.pop(name), weight, path, name)


def _load_readout(path: Path, target: Tensor) -> None:
    tensors = {stored: tensor for stored, _, tensor in text_tensors(path, target.device)}
    if set(tensors) != {"weight"}:
        raise InvalidCheckpoint(f"{path.name} holds {_listed(tensors)}; expected one tensor named weight")
    if tensors["weight"].dtype != torch.float32:
        raise _refused(path, "weight", f"is {tensors['weight'].dtype}; a readout is FP32")
    _fill(target, tensors["weight"], path, "weight")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _fill(target: Tensor, tensor: Tensor, path: Path, name: str) -> None:
    if target.shape != tensor.shape:
        raise _refused(path, name, f"has shape {list(tensor.shape)}; config.json says {list(target.shape)}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise _refused(path, name, f"is {tensor.dtype}; expected a floating-point type of 16 or 32 bits")
    target.copy_(tensor)


def _refused(path: Path, name: str, reason: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"{path.name}: tensor {name} {reason}", field=name)
