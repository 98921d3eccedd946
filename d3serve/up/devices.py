"""What the NVIDIA driver shows, asked directly: to import torch only to learn that there is no GPU takes seconds."""

import ctypes
import os
import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

LIBRARIES: Final = ("libcuda.so.1", "nvcuda.dll")
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
MIG: Final = "MIG-"  # how the name of a part of a GPU begins
NO_DRIVER: Final = "no NVIDIA driver is installed"
# https://docs.nvidia.com/cuda/cuda-driver-api: CUresult
REASONS: Final = {
    100: "the driver sees no GPU (is CUDA_VISIBLE_DEVICES empty?)",
    803: "the driver's parts are of different versions: restart the host after an upgrade",
    804: "the driver is older than CUDA needs",
    999: "the driver failed; see dmesg",
}


class NoGPU(Exception):
    """There is none that CUDA can use; the message says why."""


def gpu_names() -> list[str]:
    """The GPUs that CUDA shows to this process, in its order.

    Raises:
        NoGPU: there is none.
    """
    driver = _driver()
    if code := driver.cuInit(0):
        raise NoGPU(REASONS.get(code, f"the driver does not start (CUDA error {code})"))
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    if not count.value:
        raise NoGPU(REASONS[100])
    names = []
    for number in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(100)
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode(errors="replace"))
    return names


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES must be for each GPU that is shown to this process: an index or a name.

    CUDA ends its list at the first one that is not there, so the driver counts. But of MIG's parts it shows a process
    one alone, however many are named: their names are taken at their word.

    Raises:
        NoGPU: there is none.
    """
    count = len(gpu_names())
    listed = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if parts := [name for name in listed if name.startswith(MIG)]:
        return parts
    return listed[:count] or [str(number) for number in range(count)]


def torch_build() -> str:
    """What torch is built for: `cpu`, `CUDA 13.0`, or nothing known; read and not imported, which takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "nothing: it is not installed"
    version = Path(spec.origin).with_name("version.py")
    text = version.read_text() if version.exists() else ""
    found = re.search(r"^cuda\b[^=]*= *(?:'([\d.]+)'|None)", text, re.MULTILINE)
    if found is None:
        return "unknown"
    return f"CUDA {found[1]}" if found[1] else "cpu"


def driver_cuda() -> str:
    """The newest CUDA that the driver runs, as in 13.0."""
    version = ctypes.c_int()
    _driver().cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _driver() -> ctypes.CDLL:
    for library in LIBRARIES:
        with suppress(OSError):
            return ctypes.CDLL(library)
    raise NoGPU(NO_DRIVER)
