"""What `make` does on a bare machine: the Python it needs, the index it asks for torch, what it says meanwhile."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import install
import pytest
from answering import answering

ROOT = Path(__file__).parents[2]


def test_an_index_is_reached_where_it_answers_and_only_there(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with answering("/torch/") as index:  # a package index that knows torch
        assert install.reaches(index)
        assert not install.reaches(f"{index}/other")
    assert not install.reaches(index), "nobody listens there any more"
    assert not install.reaches("no address")


def test_an_index_that_never_answers_is_not_waited_for(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(install, "PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert not install.reaches(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("reached", [True, False])
def test_pip_gets_the_index_of_cpu_wheels_or_the_person_is_told_the_size(
    monkeypatch, capsys, tmp_path, reached
):
    monkeypatch.setattr(install, "make_environment", lambda folder: folder / "python")
    monkeypatch.setattr(install, "reaches", lambda _: reached)
    ran = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: ran.append(command) or subprocess.CompletedProcess([], 0)
    )
    monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path), ".[worker]"])
    with pytest.raises(SystemExit) as ended:
        install.main()
    assert ended.value.code == 0
    [command] = ran
    assert command[-2:] == ["--editable", ".[worker]"]
    assert ("--extra-index-url" in command) is reached
    assert "--quiet" not in command, "gigabytes without a word look like a machine that hangs"
    assert str(ROOT / "constraints.txt") in command
    assert ("2.7 GB" in capsys.readouterr().err) is not reached


def test_a_gpu_gets_its_own_versions_and_those_of_the_tests_beside(monkeypatch, tmp_path):
    monkeypatch.setattr(install, "make_environment", lambda folder: folder / "python")
    monkeypatch.setattr(install, "reaches", lambda _: pytest.fail("an index of CPU builds was asked"))
    ran = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: ran.append(command) or subprocess.CompletedProcess([], 0)
    )
    monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path), ".[dev,gpu]", "--gpu"])
    with pytest.raises(SystemExit):
        install.main()
    pins = Path(ran[0][ran[0].index("--constraint") + 1]).read_text().splitlines()
    assert {"torch==2.11.0", "triton==3.6.0"} <= set(pins)
    assert any(line.startswith("pytest==") for line in pins)
    assert len({line.partition("==")[0] for line in pins}) == len(pins)


@pytest.mark.skipif(shutil.which("make") is None, reason="make")
@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_names_the_python_that_it_needs(tmp_path, target):
    """An old Python is asked for its version before anything is made with it."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "install.py", tmp_path / "tools")
    old = tmp_path / "old-python"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import runpy, sys; sys.version_info = (3, 10, 12); "
        'sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name="__main__")\' "$@"\n'
    )
    old.chmod(0o755)
    done = subprocess.run(
        ["make", target, f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert "needs Python 3.11 or newer" in line
    assert "Python 3.10" in line
    assert not (tmp_path / ".venv").exists()


def test_an_environment_of_an_old_python_is_told_from_a_new_one(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 3 10\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=f"{python} is Python 3.10"):
        install.make_environment(tmp_path)
