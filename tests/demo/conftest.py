"""The bundled checkpoint, its held-out sample, and the tools that made them."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from d3serve.model.engine import DecisionEngine

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "checkpoints" / "demo-d3"
sys.path.append(str(ROOT / "tools"))  # the tools are scripts, no package


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return CHECKPOINT


@pytest.fixture(scope="session")
def engine() -> DecisionEngine:
    return DecisionEngine.load(str(CHECKPOINT))


@pytest.fixture(scope="session")
def heldout() -> ModuleType:
    """benchmarks/heldout.py, which reads and scores the sample."""
    spec = importlib.util.spec_from_file_location("heldout", ROOT / "benchmarks" / "heldout.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["heldout"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the package to change, without the manifest that would refuse the change."""
    folder = tmp_path / "copied"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("MODEL_MANIFEST.json"))
    return folder
