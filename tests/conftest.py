"""Fixtures that several rooms' tests share."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

# Without a GPU kernels run in Triton's interpreter. Triton reads this when it is first imported, which
# torch or transformers may do in any test: so here, before them all.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

TOOLS = Path(__file__).parent.parent / "tools"


def load_tool(name: str) -> ModuleType:
    """Import a script of tools/, which is no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def checkpoint_tool() -> ModuleType:
    """tools/make_tiny_checkpoint.py, for packages of other variants."""
    return load_tool("make_tiny_checkpoint")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, checkpoint_tool: ModuleType) -> Path:
    """The bundled tiny checkpoint, in the real package format. Read only: tests that change it copy it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    written: Path = checkpoint_tool.write_checkpoint(folder)
    return written
