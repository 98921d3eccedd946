"""The workers of `d3serve up`: how many, and what of the host each has for itself."""

import os
from dataclasses import dataclass
from typing import Final

from d3serve.errors import InvalidSettings
from d3serve.settings import Settings
from d3serve.up.devices import VISIBLE, NoGPU, gpus, torch_build

THREADS: Final = "OMP_NUM_THREADS"  # torch's own default is every core


@dataclass(frozen=True)
class Place:
    """Where one worker runs: what it finds in its environment beside the settings, and the words for it."""

    env: dict[str, str]
    words: str


def places(settings: Settings) -> list[Place]:
    """A place for each of the workers asked for.

    One alone gets the host as it is. Of several each is shown one GPU, and is told to use it: one that finds its GPU
    broken must not answer from the CPU instead. They share the cores, unless OMP_NUM_THREADS says how.

    Raises:
        InvalidSettings: there are fewer GPUs.
    """
    found = usable_gpus(settings)
    count = max(1, len(found)) if settings.workers == "auto" else settings.workers
    if count == 1:
        return [Place({}, "1")]
    if count > len(found) and (found or settings.device == "cuda"):
        raise InvalidSettings(
            f"workers is {count}, and each needs a GPU of its own, but CUDA shows {len(found)} here"
            + (f": {', '.join(found)}" if found else ""),
            field="workers",
        )
    threads = max(1, _cores() // count)
    shared = {} if THREADS in os.environ else {THREADS: str(threads)}
    if not found:
        return [Place(shared, f"{threads} of {_cores()} cores")] * count
    return [Place({VISIBLE: gpu, "D3SERVE_DEVICE": "cuda"} | shared, f"GPU {gpu}") for gpu in found[:count]]


def usable_gpus(settings: Settings) -> list[str]:
    """The GPUs that workers with these settings would use; none where they would run on the CPU."""
    if settings.device == "cpu" or torch_build() == "cpu":
        return []
    try:
        return gpus()
    except NoGPU:
        return []


def _cores() -> int:
    """Cores that this process may run on, which are those of its children."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
