"""What documents for newcomers name is there, and their commands do what they say."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:d3serve|api|worker|model|kernels|tests|docs|tools|benchmarks)/[\w./*-]*)`")


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "README.md", "docs/architecture.md"])
def test_every_path_that_a_document_names_is_there(document: str) -> None:
    named = NAMED.findall((ROOT / document).read_text())
    assert named or document == "README.md"
    assert [path for path in named if not list(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_runs_the_tests_that_are_asked_for_and_nothing_else() -> None:
    command = ["make", "-n", "test", 'T=tests/store -k "lease or fence"']
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [run] = [line for line in told.splitlines() if "pytest" in line]
    assert run.endswith('tests/store -k "lease or fence"')
    assert "ruff" not in told
