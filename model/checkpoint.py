"""From an opened package to weights on the device."""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from d3serve.errors import InvalidCheckpoint
from d3serve.kernels.matrix import INT4_GROUPS, Int4Matrix, quantize_rows
from d3serve.model.compressed import Scheme, dequantize, repack
from d3serve.model.config import CODES, Geometry
from d3serve.model.package import Package
from d3serve.model.placement import Quantization, multiplies_float8, multiplies_int4
from d3serve.model.shards import (
    READOUT,
    named_tensors,
    stored_types,
    tensor_sizes,
    text_name,
    vision_name,
)
from d3serve.model.vision_config import VisionGeometry
from d3serve.model.vision_weights import VisionAllocator, VisionWeights
from d3serve.model.weights import PLAIN, Allocator, Kept, Weights, scale_name

log = logging.getLogger(__name__)

MOST_PACKED = 16  # weights in one stored number: INT4 packs eight into an integer of 32 bits
READERS = 8  # threads that copy a file's bytes to a GPU: enough to keep a fast disk and the bus busy at once


def load_weights(
    package: Package,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
) -> Weights:
    """Stream the package's tensors into fused parameters on `device`; plain matrices become `dtype`.

    Norms, A_log, dt_bias and the readout are FP32 whatever `dtype` is. Published FP8 and INT4 matrices stay what
    they are where the device multiplies them and are unpacked elsewhere; `quantization` makes plain ones FP8.

    Raises:
        InvalidCheckpoint: a tensor is missing, unknown, doubled, or of another shape than the geometry says;
            or the device has too little memory.
    """
    started = time.monotonic()
    geometry, files = package.geometry, package.weight_files
    _require_stored(geometry, files)
    kept = _kept(package, device, dtype, quantization)
    require_memory(geometry, dtype, kept, free_bytes=free_bytes(device))
    allocator = Allocator(geometry, device, dtype, kept)
    weights = allocator.weights(CODES)
    _fill_all(_Loading(allocator.targets, package.scheme, device, packed=allocator.packed), package)
    _load_readout(package.folder / READOUT, weights.readout)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies are under way
    seconds = time.monotonic() - started
    size = sum(path.stat().st_size for path in files)
    log.info("read %.2f GB in %.1f s: %.2f GB/s", size / 1e9, seconds, size / 1e9 / seconds)
    return weights


def _kept(
    package: Package, device: torch.device, dtype: torch.dtype, quantization: Quantization | None
) -> Kept:
    """Read from the files' headers which matrices stay quantized.

    INT4 with other scales than BF16, or other groups than products read, is unpacked.
    """
    types = {name: kind for path in package.weight_files for name, kind in stored_types(path)}
    float8, int4, group = set[str](), set[str](), package.scheme.group_size
    if multiplies_float8(device, dtype):
        float8 = {name for name, kind in types.items() if kind == "F8_E4M3"}
        if quantization:
            float8 |= quantizable(package.geometry, inputs=quantization == "fp8-all")
    if multiplies_int4(device) and group in INT4_GROUPS:
        weights = (name.removesuffix("_packed") for name in types if name.endswith(".weight_packed"))
        int4 = {name for name in weights if types.get(scale_name(name)) == "BF16"}
    return Kept(float8 - int4, int4, group)


def load_tower(
    package: Package, geometry: VisionGeometry, device: torch.device, dtype: torch.dtype
) -> VisionWeights:
    """Stream the package's vision tower onto `device` in `dtype`; it is never quantized.

    Raises:
        InvalidCheckpoint: as `load_weights`.
    """
    _require_stored(geometry, package.weight_files)
    require_tower_memory(geometry, dtype, free_bytes=free_bytes(device))
    allocator = VisionAllocator(geometry, device, dtype)
    weights = allocator.weights()
    _fill_all(_Loading(allocator.targets, package.scheme, device, vision_name), package)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies are under way
    return weights


def _fill_all(loading: "_Loading", package: Package) -> None:
    """Read every file, shares of each at once, so that a single one is read no slower."""
    readers = READERS if loading.device.type == "cuda" else 1
    tasks = product(package.weight_files, range(readers))
    with ThreadPoolExecutor(readers) as pool:
        for _ in pool.map(lambda task: loading.read(task[0], task[1], readers), tasks):
            pass
    loading.finish(package.folder)


def quantizable(geometry: Geometry, *, inputs: bool = False) -> set[str]:
    """Name the matrices that the published FP8 packages quantize: all but the linear layers' inputs.

    With `inputs` those of q, k, v and z too.
    """
    allocator = Allocator(geometry, torch.device("meta"), torch.bfloat16)
    allocator.weights(CODES)
    names = {name for name in allocator.targets if name.endswith("_proj.weight")}
    if inputs:
        names |= {
            name for name in allocator.targets if name.endswith(("in_proj_qkv.weight", "in_proj_z.weight"))
        }
    return names


def free_bytes(device: torch.device) -> int:
    """The memory in which weights may stand: what a GPU has free, or all that this machine has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _require_stored(geometry: Geometry | VisionGeometry, files: Iterable[Path]) -> None:
    """Refuse sizes that have nothing to do with the files, before memory for them is asked for.

    Sizes that come near are refused with the first tensor that differs.
    """
    stored = sum(size for path in files for _, size in tensor_sizes(path))
    if geometry.parameters > MOST_PACKED * stored:
        raise InvalidCheckpoint(
            f"config.json: its sizes make {geometry.parameters:,} weights; the files hold {stored:,} numbers",
            field="text_config" if isinstance(geometry, Geometry) else "vision_config",
        )


def require_tower_memory(geometry: VisionGeometry, dtype: torch.dtype, *, free_bytes: int) -> None:
    """Refuse a vision tower that the device cannot hold, as `require_memory` does with a backbone."""
    needed = geometry.parameters * dtype.itemsize
    if needed > free_bytes:
        raise InvalidCheckpoint(
            f"the vision tower needs {needed / 1e9:.1f} GB of device memory in {dtype}; "
            f"{free_bytes / 1e9:.1f} GB are free"
        )


def require_memory(geometry: Geometry, dtype: torch.dtype, kept: Kept = PLAIN, *, free_bytes: int) -> None:
    """Refuse weights that the device cannot hold, before any is read.

    Raises:
        InvalidCheckpoint: the message holds both sizes.
    """
    needed = geometry.parameters // 2  # half a byte at least; what cannot be counted in bytes ends here
    if needed <= free_bytes:
        allocator = Allocator(geometry, torch.device("meta"), dtype, kept)
        weights = allocator.weights(CODES)
        needed = weights.readout.nbytes + allocator.nbytes
    if needed > free_bytes:
        raise InvalidCheckpoint(
            f"the weights need {needed / 1e9:.1f} GB of device memory in {dtype}; {free_bytes / 1e9:.1f} GB are free"
        )


class _Loading:
    """Fills targets with what files hold, each exactly once, in any order and from several threads."""

    def __init__(
        self,
        targets: dict[str, Tensor],
        scheme: Scheme,
        device: torch.device,
        name_of: Callable[[str], str | None] = text_name,
        *,
        packed: dict[str, Int4Matrix] | None = None,
    ) -> None:
        self._name_of = name_of
        self._targets = targets
        self._packed = packed or {}
        self._missing = {name: True for names in (targets, self._packed) for name in names}
        self._scheme = scheme
        self._lock = Lock()
        self._parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        self.device = device

    def read(self, path: Path, share: int, shares: int) -> None:
        """Read one of `shares` of a file. A quantized module is unpacked once its last part has come."""
        for stored, name, tensor in named_tensors(
            path, self.device, self._name_of, share=share, shares=shares
        ):
            if (module := self._module(name, tensor)) is not None:
                if parts := self._collect(module, name.removeprefix(module), tensor):
                    self._unpack(module, parts, path)
            elif name in self._targets:
                self._put(name, tensor, path, stored)
            else:
                raise _refused(path, stored, "is not part of this geometry")

    def _put(self, name: str, tensor: Tensor, path: Path, stored: str) -> None:
        self._claim(name, path, stored)
        target = self._targets[name]
        plain = tensor.is_floating_point() and tensor.element_size() > 1 and tensor.ndim == 2
        if plain and target.dtype == torch.float8_e4m3fn:
            tensor, scale = quantize_rows(tensor)
            self._claim(scale_name(name), path, stored)
            _fill(self._targets[scale_name(name)], scale, path, stored)
        _fill(target, tensor, path, stored)

    def _claim(self, name: str, path: Path, stored: str) -> None:
        """Let a target be filled once: of two threads that bring the same tensor, one is refused."""
        if not self._missing.pop(name, False):
            raise _refused(path, stored, "is there twice")

    def finish(self, folder: Path) -> None:
        """Refuse what is still missing."""
        if self._missing:
            first, more = next(iter(self._missing)), len(self._missing) - 1
            also = f" and {more} more" if more else ""
            raise InvalidCheckpoint(
                f"{folder}: tensor {first} is missing, or a part of it{also}", field=first
            )

    def _module(self, name: str, tensor: Tensor) -> str | None:
        """The prefix of the quantized module that `tensor` is a part of, if it has to be unpacked."""
        kept = self._targets.get(name, tensor).dtype == torch.float8_e4m3fn or name.endswith("_scale")
        if name in self._targets and (kept or tensor.element_size() > 1):
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
            weight = repack(parts, self._scheme) if name in self._packed else dequantize(parts, self._scheme)
        except ValueError as error:
            raise _refused(path, name, f"is packed inconsistently: {error}") from None
        if isinstance(weight, Tensor):
            self._put(name, weight, path, name)
            return
        self._claim(name, path, name)
        target = self._packed[name]
        _require_shape(target.shape, weight.shape, path, name)
        target.copy_(weight)


def _load_readout(path: Path, target: Tensor) -> None:
    tensors = {stored: tensor for stored, _, tensor in named_tensors(path, target.device)}
    if set(tensors) != {"weight"}:
        raise InvalidCheckpoint(f"{path.name} holds {_listed(tensors)}; expected one tensor named weight")
    if tensors["weight"].dtype != torch.float32:
        raise _refused(path, "weight", f"is {tensors['weight'].dtype}; a readout is FP32")
    _fill(target, tensors["weight"], path, "weight")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _fill(target: Tensor, tensor: Tensor, path: Path, name: str) -> None:
    _require_shape(target.shape, tensor.shape, path, name)
    if not tensor.is_floating_point() or (tensor.element_size() < 2 and tensor.dtype != target.dtype):
        raise _refused(path, name, f"is {tensor.dtype}; expected a floating-point type of 16 or 32 bits")
    target.copy_(tensor)


def _require_shape(wanted: torch.Size, found: torch.Size, path: Path, name: str) -> None:
    if wanted != found:
        raise _refused(path, name, f"has shape {list(found)}; config.json says {list(wanted)}")


def _refused(path: Path, name: str, reason: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"{path.name}: tensor {name} {reason}", field=name)
