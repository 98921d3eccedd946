"""Every benchmark can be started: none runs in CI, so a name that moved would be missed on a machine with a GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, pathlib, sys
sys.path.insert(0, "benchmarks")
for script in sorted(pathlib.Path("benchmarks").glob("*.py")):
    try:
        importlib.import_module(script.stem)
    except ImportError as error:
        print(script, error)
"""


def test_every_benchmark_imports_what_is_there():
    environment = os.environ | {
        "PLAIN_REDIS_URL": "redis://127.0.0.1:1/0"
    }  # of an app that a benchmark starts
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2_000:]
