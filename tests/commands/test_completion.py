"""A shell that has learnt of `d3serve` completes its commands and options."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

D3SERVE = Path(sys.executable).with_name("d3serve")


@pytest.mark.parametrize(
    ("words", "offered"),
    [("d3serve su", "submit"), ("d3serve ask --yes", "--yes-no"), ("d3serve jobs ", "purge")],
)
def test_commands_and_options_are_completed(words: str, offered: str) -> None:
    told = {"_D3SERVE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [D3SERVE], env=os.environ | told, check=False, capture_output=True, text=True, timeout=60
    )
    assert offered in done.stdout.split(), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_given_what_it_runs(shell: str) -> None:
    env = os.environ | {"_D3SERVE_COMPLETE": f"source_{shell}"}
    done = subprocess.run([D3SERVE], env=env, check=False, capture_output=True, text=True, timeout=60)
    assert "_D3SERVE_COMPLETE" in done.stdout, done.stderr
