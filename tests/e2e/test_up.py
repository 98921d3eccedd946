"""The whole service as a user meets it: commands, HTTP, the tiny checkpoint, answers checked elsewhere."""

import concurrent.futures
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from oracle import Oracle, difference
from pydantic import TypeAdapter

from d3serve.api.bounded_connection import MAX_HEAD_BYTES
from d3serve.commands.demo import DRAWING, DRAWN, REQUEST, TRUTHS
from d3serve.schemas import DecisionRequest
from d3serve.schemas.questions import Answer

ROOT = Path(__file__).parents[2]

STATE = {"order": 17, "note": "charged twice, wants the money back", "tags": ["é", None, 1.5]}
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "Is a refund asked for?"},
    "team": {"type": "choice", "instructions": "Who?", "criteria": {"billing": "money", "it": None}},
    "mood": {"type": "score", "criteria": ["calm", "cross", "furious"]},
}


def decide(url: str, body: dict) -> dict:
    with httpx.Client(base_url=url, timeout=90) as client:
        posted = client.post("/v1/jobs", json={"model": "jev-latest", **body})
        assert posted.status_code == 202, posted.text
        polled = client.get(posted.headers["location"], params={"wait": 60, "include": "result"})
        assert polled.json()["status"] == "succeeded", polled.text
        return polled.json()["result"]


def test_answers_over_http_are_those_of_an_independent_implementation(
    server: str, tiny_checkpoint: Path
) -> None:
    body = {"model": "jev-latest", "state": STATE, "questions": QUESTIONS}
    answers = decide(server, body)["answers"]
    oracle = Oracle(tiny_checkpoint)
    assert list(answers) == list(QUESTIONS)
    for name, question in DecisionRequest.model_validate(body).questions.items():
        answer = TypeAdapter(Answer).validate_python(answers[name])
        assert difference(answer, oracle.probabilities(STATE, question)) < 1e-4


def test_jobs_with_one_state_are_answered_by_one_reading_of_it(server: str) -> None:
    state = "A state that no other test sends: the parcel never came."
    bodies = [{"state": state, "questions": {name: QUESTIONS[name]}} for name in QUESTIONS]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        usages = [result["usage"] for result in pool.map(lambda body: decide(server, body), bodies)]
    assert sorted(usage["state_cached"] for usage in usages) == [False, True, True]
    assert len({usage["state_tokens"] for usage in usages}) == 1
    for usage in usages:
        question_tokens = usage["input_tokens"] - usage["state_tokens"]
        assert usage["computed_tokens"] == question_tokens + (
            0 if usage["state_cached"] else usage["state_tokens"]
        )


def test_every_block_of_the_readme_runs(server: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    commands = next(block for block in blocks if "d3serve ask" in block)
    script = "\n".join(line for line in commands.splitlines() if "d3serve up" not in line)
    script = script.replace(".venv/bin/d3serve", shlex.join([sys.executable, "-m", "d3serve"]))
    script = script.replace("localhost:8000", server.removeprefix("http://"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120,
        env={"PATH": "/usr/bin:/bin", "D3SERVE_URL": server, "COLUMNS": "120", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "input tokens" in done.stdout
    assert json.loads(done.stdout[done.stdout.index('{"id"') :])["status"] in {
        "queued",
        "running",
        "succeeded",
    }


def test_ask_prints_a_refusal_and_no_traceback(server: str) -> None:
    command = [
        sys.executable,
        "-m",
        "d3serve",
        "ask",
        "--url",
        server,
        "--state",
        "x",
        "--choice",
        "One?: a | a",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "options" in done.stderr


@pytest.mark.slow
def test_the_demo_answers_about_a_package_as_its_maintainers_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "d3serve", "demo", "--model", str(ROOT / "checkpoints" / "demo-d3")]
    done = subprocess.run(
        [*command, "--data-dir", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line
    ]
    answers = {row[0]: (row[1], row[-1]) for row in rows}
    assert list(answers) == [*REQUEST["questions"], *DRAWING["questions"]]
    for name in ("section", "needs a network", "is a game", "role"):
        assert answers[name] == (TRUTHS[name], TRUTHS[name])
    for name, truth in DRAWN.items():
        assert answers[name] == (truth, truth)
    assert "read once" in done.stdout


def test_a_missing_checkpoint_ends_the_start_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "d3serve", "up", "--port", "0", "--model", str(tmp_path)]
    done = subprocess.run(
        [*command, "--data-dir", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    assert f"config.json is missing from {tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_request_head_without_an_end_is_cut_off(server):
    host, port = server.removeprefix("http://").split(":")
    received = None
    with socket.create_connection((host, int(port)), timeout=60) as connection, suppress(ConnectionError):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 40 * MAX_HEAD_BYTES)
        received = connection.recv(12)  # without the bound nothing comes, and this times out
    assert received in {None, b"", b"HTTP/1.1 400"}, "None: reset while there was more to send"
