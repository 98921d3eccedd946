"""`python tools/install.py VENV REQUIREMENT [--gpu]`: a virtual environment with the tested versions; what `make` runs.

On Linux the package index has torch for CUDA alone. A machine without a GPU needs none of it, so PyTorch's own index of
CPU builds is asked first, where it can be reached. With --gpu the versions are those of constraints-gpu.txt.
"""

from __future__ import annotations  # an older Python, too, must be able to say that it is too old

import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

NEEDED = (3, 11)
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
PATIENCE_S = 5.0  # for the whole question, names included: behind a firewall nothing answers
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
CONSTRAINTS_GPU = CONSTRAINTS.with_name("constraints-gpu.txt")
WITHOUT = (
    "PyTorch's CPU wheels ({}) cannot be reached, so torch comes from pip's own index. Where that is PyPI, on Linux, it"
    " brings CUDA: 2.7 GB to download and 5.7 GB of disk."
)


def require_python(version: tuple[int, ...], name: str) -> None:
    """Return if this Python will do, else exit with a line that names one that will."""
    if version < NEEDED:
        found, needed = (".".join(map(str, each[:2])) for each in (version, NEEDED))
        sys.exit(
            f"error: d3serve needs Python {needed} or newer, and {name} is Python {found}: "
            f"install one and name it, for example `make clean demo PYTHON=python{needed}`"
        )


def make_environment(folder: Path) -> Path:
    """The Python of a virtual environment, which is made where there is none."""
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)  # noqa: S603 # this very Python
    asked = [str(python), "-c", "import sys; print(*sys.version_info[:2])"]
    told = subprocess.run(asked, check=True, capture_output=True, text=True)  # noqa: S603 # the one just made
    require_python(tuple(map(int, told.stdout.split())), str(python))
    return python


def reaches(index: str) -> bool:
    """Whether a package index answers for torch, soon."""
    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index}/torch/", timeout=PATIENCE_S):  # noqa: S310 # our own address
                answered.set()
        except (OSError, ValueError):
            pass
        finally:
            asked.set()

    asked = threading.Event()
    threading.Thread(target=ask, daemon=True).start()  # looking up a name knows no time limit
    asked.wait(PATIENCE_S)
    return answered.is_set()


def for_gpu(folder: Path) -> Path:
    """A file of constraints in the environment: those of the GPU, and of the other file what they leave open."""

    def pins(path: Path) -> dict[str, str]:
        lines = path.read_text().splitlines()
        return {line.partition("==")[0]: line for line in lines if "==" in line and not line.startswith("#")}

    merged = folder / "constraints.txt"
    merged.write_text("\n".join((pins(CONSTRAINTS) | pins(CONSTRAINTS_GPU)).values()) + "\n")
    return merged


def cpu_index() -> list[str]:
    """The option by which pip finds torch for CPUs; none where that index cannot be reached, which is told."""
    if reaches(CPU_WHEELS):
        return ["--extra-index-url", CPU_WHEELS]
    print(WITHOUT.format(CPU_WHEELS), file=sys.stderr, flush=True)
    return []


def main() -> None:
    """Make the environment and install into it, showing how far it is."""
    require_python(sys.version_info[:2], sys.executable)
    folder, requirement = Path(sys.argv[1]), sys.argv[2]
    python = make_environment(folder)
    gpu = "--gpu" in sys.argv[3:]
    constraints, index = (for_gpu(folder), []) if gpu else (CONSTRAINTS, cpu_index())
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--constraint",
        str(constraints),
    ]
    sys.exit(subprocess.run([*pip, *index, "--editable", requirement], check=False).returncode)  # noqa: S603


if __name__ == "__main__":
    main()
