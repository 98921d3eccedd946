"""How fast a package's weights reach the GPU, beside `dd` of the same files.

    python benchmarks/loading.py FOLDER [--gigabytes 52] [--cold-gigabytes 15] [--out FILE] [--tiny]

Writes a package of the 27B's tensors, as many layers as fit the size, into FOLDER, which should lie on the disk to be
measured; loads it as the worker does, compares a sample with the files, and times: files in the page cache, then
files that the kernel was asked to forget. Deletes what it wrote.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import torch
from engine import synchronize
from geometries import GEOMETRY_27B, GEOMETRY_TINY
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from d3serve.model.checkpoint import load_weights
from d3serve.model.compressed import Scheme
from d3serve.model.config import CODES, Geometry
from d3serve.model.fields import Fields
from d3serve.model.package import Package
from d3serve.model.shards import INDEX, READOUT, backbone_files
from d3serve.model.weights import Allocator, Weights

SHARD_BYTES = 5_000_000_000
VISION_VALUES = 460_730_096  # of the 27B: read over, not into memory
WRITERS = 3  # shards that are written at once
SAMPLED = 4  # one of so many layers is compared
LEAVE_BYTES = 4_000_000_000  # of the disk


def tensors(geometry: Geometry, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a package by its stored name, BF16, drawn on the device, one at a time."""
    allocator = Allocator(geometry, torch.device("meta"), torch.bfloat16)
    allocator.weights(CODES)
    for name, target in allocator.targets.items():
        drawn = torch.empty(target.shape, dtype=torch.bfloat16, device=device).normal_()
        yield f"language_model.{name}", drawn.cpu()


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file, and wait until it is on the disk."""
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_package(
    folder: Path, geometry: Geometry, device: torch.device, shard_bytes: int, vision: int
) -> list[Path]:
    """Write shards, index and readout; what `load_weights` reads of a package."""
    shard: dict[str, Tensor] = {}
    written: list[tuple[Path, list[str], Future[None]]] = []
    with ThreadPoolExecutor(WRITERS) as pool:

        def write() -> None:
            if len(written) >= WRITERS:
                written[-WRITERS][2].result()  # so many shards in memory and no more
            path = folder / f"model-{len(written) + 1:05d}.safetensors"
            written.append((path, list(shard), pool.submit(save, dict(shard), path)))
            shard.clear()

        for name, tensor in tensors(geometry, device):
            shard[name] = tensor
            if sum(each.nbytes for each in shard.values()) >= shard_bytes:
                write()
        shard["visual.blocks"] = torch.zeros(vision, dtype=torch.bfloat16)
        write()
    save_file({"weight": torch.randn(CODES, geometry.hidden)}, folder / READOUT)
    weight_map = {name: path.name for path, names, done in written if done.result() is None for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return [path for path, _, _ in written]


def verify(weights: Weights, files: list[Path], geometry: Geometry) -> int:
    """Compare three tensors of every fourth layer and the embedding with the files, bit by bit; count them."""
    compared = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                loaded = view_of(weights, stored.removeprefix("language_model."), geometry)
                if loaded is None:
                    continue
                if not torch.equal(loaded.cpu(), file.get_tensor(stored).to(loaded.dtype)):
                    raise SystemExit(f"{stored} of {path.name} is not what was loaded, so nothing is timed")
                compared += 1
    return compared


def view_of(weights: Weights, name: str, geometry: Geometry) -> Tensor | None:
    """The loaded tensor of a name in a package, if it is one of the sample."""
    if name == "embed_tokens.weight":
        return weights.embedding
    _, _, rest = name.partition("layers.")
    index, _, part = rest.partition(".")
    if not index.isdecimal() or int(index) % SAMPLED:
        return None
    layer = weights.layers[int(index)]
    sample = {
        "mlp.up_proj.weight": layer.gate_up[geometry.ffn :],
        "mlp.down_proj.weight": layer.down,
        "input_layernorm.weight": layer.input_norm,
    }
    return cast("Tensor | None", sample.get(part))


def forget(files: list[Path]) -> None:
    """Ask the kernel to drop the files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd(files: list[Path]) -> float:
    """Seconds of one dd after another."""
    began = time.perf_counter()
    for path in files:
        subprocess.run(  # noqa: S603  (a fixed command on our own files)
            ["/bin/dd", f"if={path}", "of=/dev/null", "bs=16M", "status=none"], check=True
        )
    return time.perf_counter() - began


def dd_together(files: list[Path]) -> float:
    """Seconds of one dd a file, all at once: what the disk gives to several readers."""
    began = time.perf_counter()
    running = [
        subprocess.Popen(["/bin/dd", f"if={path}", "of=/dev/null", "bs=16M", "status=none"])  # noqa: S603
        for path in files
    ]
    codes = [each.wait() for each in running]
    if any(codes):
        raise SystemExit("dd failed")
    return time.perf_counter() - began


def peak_host_bytes(run: Callable[[], object]) -> int:
    """How much resident memory this process gained at most during `run`, looked at every 10 ms."""
    before, seen, over = resident_bytes(), [0], Event()

    def watch() -> None:
        while not over.wait(0.01):
            seen[0] = max(seen[0], resident_bytes())

    watcher = Thread(target=watch)
    watcher.start()
    run()
    over.set()
    watcher.join()
    return max(0, seen[0] - before)


def resident_bytes() -> int:
    """Resident memory of this process, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Run:
    """One package on one device, and what was measured with it."""

    def __init__(self, folder: Path, geometry: Geometry, device: torch.device) -> None:
        """Measure nothing yet."""
        self.folder, self.geometry, self.device = folder, geometry, device
        self.report: dict[str, Any] = {}

    def load(self) -> Weights:
        """Load as the worker does."""
        package = Package(
            folder=self.folder, geometry=self.geometry, scheme=Scheme("plain"), decision=cast("Any", None),
            weight_files=backbone_files(self.folder, Fields.read(self.folder / INDEX)),
            tokenizer_config=None, manifest=None,
        )  # fmt: skip
        weights = load_weights(package, self.device, torch.bfloat16)
        synchronize(self.device)
        return weights

    def timed_load(self) -> float:
        """Seconds of a load into memory that is free again."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        began = time.perf_counter()
        self.load()
        return time.perf_counter() - began

    def note(self, what: str, seconds: float, size: int) -> None:
        """Keep and print a time."""
        self.report[what] = {"s": round(seconds, 2), "gb": size / 1e9, "gb_s": round(size / 1e9 / seconds, 2)}
        print(f"{what}: {seconds:.2f} s, {size / 1e9:.1f} GB, {size / 1e9 / seconds:.2f} GB/s", flush=True)


def measure(run: Run, files: list[Path], cold_bytes: int) -> None:
    """Verify, then time: in the page cache, then from the disk."""
    text = sum(path.stat().st_size for path in files) - run.report["vision_bytes"]
    size = text + run.report["vision_bytes"]
    kept: list[Weights] = []
    run.report["peak_host_gb"] = peak_host_bytes(lambda: kept.append(run.load())) / 1e9
    run.report["verified_tensors"] = verify(kept.pop(), files, run.geometry)
    shown = {name: run.report[name] for name in ("peak_host_gb", "verified_tensors")}
    print(
        json.dumps(shown | {"largest_file_gb": max(path.stat().st_size for path in files) / 1e9}), flush=True
    )
    run.note("load, page cache", run.timed_load(), text)
    run.note("dd, page cache", dd(files), size)
    forget(files)
    run.note("load, forgotten files", run.timed_load(), text)
    few = files[: max(1, cold_bytes // max(1, files[0].stat().st_size))]
    few_bytes = sum(path.stat().st_size for path in few)
    for name, read in (("dd, forgotten files", dd), ("dd, forgotten files at once", dd_together)):
        forget(files)
        run.note(name, read(few), few_bytes)


def main() -> None:
    """Write the package, measure, delete it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=52)
    parser.add_argument("--cold-gigabytes", type=float, default=15, help="how much dd reads from the disk")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--tiny", action="store_true", help="a small geometry, to try the script itself")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = options.folder / "package"
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free - LEAVE_BYTES
    full, vision, shard = (
        (GEOMETRY_TINY, 1000, 2_000_000) if options.tiny else (GEOMETRY_27B, VISION_VALUES, SHARD_BYTES)
    )
    geometry = fitting(full, min(options.gigabytes * 1e9, free) - 2 * vision)
    run = Run(folder, geometry, device)
    try:
        began = time.perf_counter()
        files = write_package(folder, geometry, device, shard, vision)
        size = sum(path.stat().st_size for path in files)
        run.report |= {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__, "layers": len(geometry.layer_types), "files": len(files),
            "vision_bytes": 2 * vision,
        }  # fmt: skip
        run.note("write", time.perf_counter() - began, size)
        measure(run, files, int(options.cold_gigabytes * 1e9))
    finally:
        shutil.rmtree(folder)
    if options.out:
        options.out.write_text(json.dumps(run.report, indent=1) + "\n")


def fitting(full: Geometry, size: float) -> Geometry:
    """The geometry with as many of its layers as fit `size` bytes."""
    for count in range(len(full.layer_types), 0, -1):
        geometry = dataclasses.replace(full, layer_types=full.layer_types[:count])
        allocator = Allocator(geometry, torch.device("meta"), torch.bfloat16)
        allocator.weights(CODES)
        if 2 * sum(each.numel() for each in allocator.targets.values()) <= size:
            return geometry
    raise SystemExit(f"{size / 1e9:.1f} GB hold no layer")


if __name__ == "__main__":
    main()
