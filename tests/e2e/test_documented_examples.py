"""The examples of docs/api.md as they stand there, against the bundled checkpoint: they run, and are answered right."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from d3serve.commands.main import app
from d3serve.errors import StorageUnavailable

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```(sh|python)\n(.*?)^```", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE | re.DOTALL
)


def example(containing: str, server: str) -> list[str]:
    """The one example that holds a text, as a command, with our server in the place of its own."""
    ((kind, text),) = [block for block in BLOCKS if containing in block[1]]
    address = server.removeprefix("http://")
    text = text.replace("127.0.0.1:8000", address).replace("localhost:8000", address)
    return [sys.executable, "-c", text] if kind == "python" else ["bash", "-ec", text]


def printed(containing: str, server: str) -> str:
    scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("D3SERVE_")}
    done = subprocess.run(
        example(containing, server), capture_output=True, text=True, timeout=120, check=False,
        env=env | {"PATH": scripts, "D3SERVE_URL": server},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_job_that_is_posted_first_gets_sensible_answers(demo_server: str) -> None:
    job = json.loads(printed("curl -s localhost:8000/v1/jobs", demo_server))
    done = httpx.get(
        demo_server + job["urls"]["self"], params={"wait": 60, "include": "result"}, timeout=90
    ).json()
    answers = done["result"]["answers"]
    assert answers["network"]["noul"] > 0.9
    assert answers["section"]["probabilities"]["network tools"] > 0.9
    assert 0 < answers["needs"]["score"] < 2


@pytest.mark.slow
def test_our_client_and_the_stock_ones_print_what_is_true(demo_server: str) -> None:
    ours = printed("from d3serve.client import Choice", demo_server).splitlines()
    section, probability, game = ours[0].rsplit(" ", 2)
    assert (section, float(probability) > 0.9, game) == ("network tools", True, "False")
    assert [line.split()[-1] for line in ours[1:]] == ["games", "tools"]
    assert printed("TypeSafeClient", demo_server) == "network tools\n"
    assert float(printed("client.decisions.create", demo_server)) > 0.9


@pytest.mark.slow
def test_a_batch_is_answered_as_the_documents_show(demo_server: str) -> None:
    rows = dict(line.split() for line in printed("client.batches.create", demo_server).splitlines())
    assert float(rows["ntp"]) > 0.9
    assert rows.keys() == {"ntp", "karts"}


@pytest.mark.slow
def test_options_with_colons_are_asked_both_ways(demo_server: str) -> None:
    assert printed("--choice 'Section?: games", demo_server).count("network: talk") == 2


NOBODY = ["ask", "--url", "http://127.0.0.1:9", "--state", "x", "--yes-no", "y"]


def test_nobody_waits_for_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a second at most, of the ten that it once took; how long a busy machine takes besides is its own affair."""
    slept, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    assert isinstance(CliRunner().invoke(app, NOBODY).exception, StorageUnavailable)
    assert 0 < sum(slept) < 1


def test_who_asks_a_server_that_is_not_there_learns_how_to_start_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "d3serve", *NOBODY], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "Start a server with `d3serve up --model checkpoints/demo-d3`" in done.stderr
