"""One running d3serve for all end-to-end tests: the real command, broker, API, queue, worker and model."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READY = re.compile(r"d3serve is ready: (http://\S+)")


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[str]:
    """The address of `d3serve up` with a checkpoint."""
    command = [sys.executable, "-m", "d3serve", "up", "--port", "0", "--model", str(model)]
    log = folder / "up.log"  # a pipe that nobody reads would fill, and hold up whoever logs
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--data-dir", str(folder)], stderr=stderr, stdout=subprocess.DEVNULL
        )
    try:
        while not (found := READY.search(log.read_text())):
            if process.poll() is not None:
                pytest.fail("d3serve up ended before it was ready:\n" + log.read_text())
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert process.returncode == 0, "SIGTERM is a clean end"


@pytest.fixture(scope="session")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `d3serve up` with the tiny checkpoint."""
    with serving(tiny_checkpoint, tmp_path_factory.mktemp("up")) as address:
        yield address


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `d3serve up` with the bundled checkpoint."""
    with serving(ROOT / "checkpoints" / "demo-d3", tmp_path_factory.mktemp("demo")) as address:
        yield address
