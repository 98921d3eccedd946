"""d3serve as pip installs it: the wheel, in environments that hold the base and chosen extras, and nothing else.

Distributions are linked from the environment of the tests, so that such an installation takes no time and no network.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
ROOMS = ("d3serve", "api", "worker", "model", "kernels", "checkpoints")


def build(folder: Path) -> Path:
    """A wheel that is built from a source distribution of a copy of this tree."""
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, tree)
    for name in ROOMS:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(tree)]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = (folder / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, *extras: str) -> Path:
    """The Python of a new environment that holds the wheel with these extras."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    [about] = packages.glob("d3serve-*.dist-info")
    for name in _closure(metadata.PathDistribution(about), frozenset(extras)):
        for path in metadata.files(name) or ():
            top = path.parts[0]
            if (
                top not in {"..", "__pycache__"}
                and not top.endswith(".pth")
                and not (packages / top).exists()
            ):
                (packages / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run `d3serve` in such an environment, where no server is on PATH and the Hub is out of reach."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("D3SERVE_", "PYTHON"))}
    given |= {"PATH": "/nowhere", "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "hub"), "COLUMNS": "200"}
    command = [str(python), "-m", "d3serve", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=given | env, timeout=120
    )


def _closure(distribution: metadata.Distribution, extras: frozenset[str]) -> set[str]:
    """All distributions that one needs with these extras; our own that are asked for by it itself included."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    way = [(distribution, extras)]
    while way:
        each, wanted = way.pop()
        for line in each.requires or ():
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *wanted)]
            if requirement.marker and not any(map(requirement.marker.evaluate, environments)):
                continue
            name, more = re.sub(r"[-_.]+", "-", requirement.name).lower(), frozenset(requirement.extras)
            if (name, more) in seen:
                continue
            seen.add((name, more))
            if name == "d3serve":
                way.append((distribution, more))
            else:
                found.add(name)
                way.append((metadata.distribution(name), more))
    return found
