"""How much memory a worker's model has, as the worker tells it."""

import resource
import sys
from pathlib import Path

from d3serve.worker.engines import Engine


def memory_of(engine: Engine) -> dict[str, int]:
    """What is in use: of its GPU by whoever uses it, with all that there is; on a CPU, by this process.

    For the thread that runs the engine, between two turns.

    Raises:
        DeviceError: the GPU does not answer.
    """
    memory = engine.device_memory()
    if memory is None:
        return {"memory_bytes": resident_bytes()}
    used, total = memory
    return {"memory_bytes": used, "memory_total_bytes": total}


def resident_bytes() -> int:
    """Memory that this process holds; where the system does not tell, the most that it has held."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
