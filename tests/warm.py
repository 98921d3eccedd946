"""Runs `d3serve` in a process that has imported it already: of a command that ends at once, imports are nearly all."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["d3serve.commands.main"])


def d3serve(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """What the command says and its exit code, in the environment of the tests less d3serve's own variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("D3SERVE_")}
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = _FORKS.Process(target=_run, args=(arguments, clean | env, stdout, stderr))
        process.start()
        process.join(60)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(["d3serve", *arguments], 60)
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(arguments, code, stdout.read_text(), stderr.read_text())


def _run(arguments: tuple[str, ...], environment: Mapping[str, str], stdout: Path, stderr: Path) -> None:
    from d3serve.commands.main import main  # by now it is there

    for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["d3serve", *arguments]
    main()
