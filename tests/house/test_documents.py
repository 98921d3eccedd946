"""Commands of documents for newcomers do what they say, wherever they are run."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_runs_the_tests_that_are_asked_for_and_nothing_else() -> None:
    command = ["make", "-n", "test", 'T=tests/store -k "lease or fence"']
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [run] = [line for line in told.splitlines() if "pytest" in line]
    assert run.endswith('tests/store -k "lease or fence"')
    assert "ruff" not in told


def test_tests_in_the_background_interrupt_their_children_all_the_same() -> None:
    """`make test &` in a script, or under nohup, leaves SIGINT ignored; it did to those that a test interrupts."""
    interrupt = "import conftest, subprocess; print(subprocess.call(['sh', '-c', 'kill -INT $$']))"
    in_background = "trap '' INT; exec \"$@\""
    command = ["sh", "-c", in_background, "sh", sys.executable, "-c", interrupt]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    told = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(told.stdout) == -signal.SIGINT
