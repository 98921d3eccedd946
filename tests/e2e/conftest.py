"""One running d3serve for all end-to-end tests: the real command, broker, API, queue, worker and model."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

READY = re.compile(r"d3serve is ready: (http://\S+)")


@pytest.fixture(scope="session")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `d3serve up` with the tiny checkpoint."""
    folder = tmp_path_factory.mktemp("up")
    command = [sys.executable, "-m", "d3serve", "up", "--port", "0", "--model", str(tiny_checkpoint)]
    process = subprocess.Popen(
        [*command, "--data-dir", str(folder)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    lines = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if found := READY.search(line):
                break
        else:
            pytest.fail("d3serve up ended before it was ready:\n" + "".join(lines))
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0, "SIGTERM is a clean end"
