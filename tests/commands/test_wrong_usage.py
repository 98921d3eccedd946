"""The command line used wrongly: one line that says what to do, before anything is started, never a traceback."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import warm
from rich.console import Console

from d3serve.commands import ask
from d3serve.errors import InvalidRequest, InvalidSettings, StartupError
from d3serve.settings import Settings
from d3serve.up import local, supervisor
from d3serve.up.broker import running_broker
from d3serve.up.local import running

FILE = Path(__file__)


def d3serve(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "d3serve", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("D3SERVE_")}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=clean | env)


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["up", "--redis-url", "localhost:6379"], {}, "D3SERVE_REDIS_URL must begin with redis://"),
        (["up", "--port", "0", "--data-dir", str(FILE)], {}, "choose another with --data-dir"),
        (["up", "--port", "0", "--host", "0.0.0.0"], {}, "refusing to listen on 0.0.0.0"),  # noqa: S104 - refused
        (["up", "--port", "99999"], {}, "D3SERVE_PORT must be less than or equal to 65535, not 99999"),
        (["api", "--port", "0"], {}, "set D3SERVE_REDIS_URL"),
        (
            ["up", "--port", "0"],
            {"D3SERVE_API_KEYS_FILE": "/none"},
            "keys in /none: No such file or directory",
        ),
        (["up", "--port", "0", "--model", ""], {}, "D3SERVE_MODEL must not be empty"),
        (["up", "--port", "0", "--data-dir", ""], {}, "D3SERVE_DATA_DIR must not be empty"),
        (["up", "--port", "0", "--host", " "], {}, "D3SERVE_HOST must not be empty"),
        (["up", "--port", "0"], {"D3SERVE_API_KEYS_FILE": ""}, "D3SERVE_API_KEYS_FILE is empty"),
        (["api", "--port", "0"], {"D3SERVE_REDIS_URL": ""}, "set D3SERVE_REDIS_URL"),
        (["worker"], {"D3SERVE_LANES": "interactive"}, "D3SERVE_LANES must be a JSON list"),
        (["new-key", str(FILE.parent)], {}, "cannot write"),
        (["submit", str(FILE.parent), "--out", "x"], {}, "cannot read"),
        (["ask", "--state", "x", "--yes-no", "y", "--url", "localhost:1"], {}, "must begin with http://"),
        (["ask", str(FILE), "--state", "x"], {}, "not both"),
        (["ask", str(FILE)], {}, "holds no JSON"),
        (["up", "--port", "0", "--model", str(FILE)], {}, f"model {FILE} is no folder"),
        (["up", "--port", "0", "--model", "./none"], {}, "none is no folder on this machine"),
        (
            ["up", "--port", "0", "--model", str(FILE.parent)],
            {},
            f"config.json is missing from {FILE.parent}",
        ),
        (["up", "--port", "0", "--model", "a/b/c"], {}, "cannot be a Hub id either"),
        (
            ["up", "--port", "0", "--model", "a/b"],
            {"HF_HUB_OFFLINE": "1"},
            "HF_HUB_OFFLINE forbids to fetch it",
        ),
        (["up", "--port", "0", "--model", "vllm-sr/d3-ultra"], {}, "no public description"),
        (
            ["up", "--port", "0", "--device", "cuda", "--model", "demo-d3"],
            {"CUDA_VISIBLE_DEVICES": ""},
            "device is cuda, but",
        ),
        (
            ["worker", "--redis-url", "redis://127.0.0.1:1", "--model", "./none"],
            {},
            "none is no folder on this machine",
        ),
        (["worker"], {}, "set D3SERVE_REDIS_URL"),
        (
            ["up", "--port", "0", "--model", "demo-d3"],
            {"D3SERVE_WEBHOOK_ALLOW": '["localhost"]'},
            "D3SERVE_WEBHOOK_ALLOW",
        ),
        (["demo", "--model", "./none"], {}, "none is no folder on this machine"),
    ],
)
def test_wrong_usage_is_told_in_one_line(arguments: list[str], env: dict[str, str], words: str) -> None:
    done = warm.d3serve(*arguments, **env)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1, "more was said, or something was started first"


@pytest.mark.parametrize("command", ["api", "worker", "webhooks", "batches", "jobs list"])
def test_no_process_works_on_a_server_that_may_evict(command: str, tmp_path: Path) -> None:
    with running_broker(Settings(data_dir=tmp_path)) as broker:
        with redis.Redis.from_url(broker.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        flags = ["--model", "fake:"] if command == "worker" else []
        done = warm.d3serve(*command.split(), "--redis-url", broker.url, *flags, D3SERVE_PORT="0")
    assert done.returncode == 2
    assert "would evict waiting jobs" in done.stderr.splitlines()[-1]


def test_a_password_in_a_url_is_never_shown() -> None:
    with pytest.raises(InvalidSettings) as caught:
        Settings.load(redis_url="redis:/:hunter2@host")
    assert "hunter2" not in caught.value.message


def test_a_public_address_without_keys_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor.ProcessTree, "start", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(local, "configure_logging", lambda *_, **__: None)  # the process is pytest's
    public = Settings(host="0.0.0.0", port=0, data_dir=tmp_path)  # noqa: S104 - what must be refused
    with pytest.raises(InvalidSettings, match="refusing to listen"), running(public):
        pytest.fail("it runs")


def test_a_child_that_says_why_it_ends_has_the_last_word(tmp_path: Path) -> None:
    """The reason of whichever process it was: here a worker's, whose model cannot be read."""
    arguments = ["up", "--port", "0", "--data-dir", str(tmp_path), "--model", "fake:?load_error=checkpoint"]
    done = d3serve(*arguments)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last == "error the worker process ended: the fake checkpoint is broken, as asked"


def test_a_worker_by_itself_ends_with_the_reason_too(redis_url: str) -> None:
    arguments = ["worker", "--redis-url", redis_url, "--model", "fake:?load_error=checkpoint"]
    done = d3serve(*arguments, D3SERVE_NAMESPACE="broken")
    assert done.returncode == 70
    assert done.stderr.splitlines()[-1] == "error the fake checkpoint is broken, as asked"


def test_the_last_words_of_any_process_are_those_of_its_error() -> None:
    tree = supervisor.ProcessTree()
    tree.start(
        "api 1", ["api"], {"D3SERVE_REDIS_URL": "redis://127.0.0.1:1", "D3SERVE_API_KEYS_FILE": "/none"}
    )
    try:
        with pytest.raises(StartupError, match=r"the api 1 process ended: cannot read .*/none"):
            tree.wait_until(lambda: False, 60, "nothing")
    finally:
        tree.stop()


def test_a_child_that_ends_points_to_its_log_and_prints_nothing_of_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    tree = supervisor.ProcessTree()
    tree.start("worker", ["--help"], {})  # ends at once, with text on standard output
    try:
        with pytest.raises(StartupError, match=r"the worker process ended .* above says why"):
            tree.wait_until(lambda: False, 30, "nothing")
    finally:
        tree.stop()
    assert capfd.readouterr().out == ""


def test_a_question_may_be_asked_once() -> None:
    with pytest.raises(InvalidRequest, match="'Same' is asked twice"):
        ask.build_request("x", ["Same"], ["Same: a | b"], [])


def test_a_long_question_is_named_by_its_beginning_and_asked_whole():
    text = "Is it " + "very " * 100 + "urgent?"
    ((name, question),) = ask.build_request("x", [text], [], [])["questions"].items()
    assert len(name) <= 200
    assert question["instructions"] == text


@pytest.mark.parametrize("text", ["[/x]", "[bold]x[/bold]", "[red]"])
def test_brackets_in_questions_and_options_are_shown_as_they_are(text: str) -> None:
    usage = {"input_tokens": 1, "computed_tokens": 1, "state_tokens": 1, "state_cached": False}
    answers: dict[str, Any] = {
        f"{text} 1": {"type": "noul", "noul": 1.0},
        f"{text} 2": {"type": "choice", "choice": text, "probabilities": {text: 1.0}, "confidence": 1.0},
        f"{text} 3": {
            "type": "score", "score": 0.0, "legend": {"0": text}, "probabilities": {"0": 1.0}, "confidence": 1.0,
        },
    }  # fmt: skip
    job = {"status": "succeeded", "result": {"model": text, "answers": answers, "usage": usage}}
    screen = io.StringIO()
    assert ask.show(job, Console(file=screen, width=200))
    assert screen.getvalue().count(text) == 6
    screen = io.StringIO()
    assert not ask.show({"status": "failed", "error": {"code": "c", "message": text}}, Console(file=screen))
    assert screen.getvalue() == f"failed c: {text}\n"
