"""Logs are one event a line and hold no client's text."""

import ast
import io
import json
import logging
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from d3serve.logs import PRIVATE, configure_logging
from d3serve.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    configure_logging(Settings(), worker="w")
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    root.handlers[:] = before
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_private_fields_are_blanked(log):
    structlog.get_logger().info("x", state="secret", answers={"a": "secret"}, job_id="j")
    [event] = log()
    assert (event["state"], event["answers"]) == ("[redacted]", "[redacted]")
    assert (event["job_id"], event["worker"], event["level"]) == ("j", "w", "info")


def test_an_exception_shows_its_type_and_place_but_not_its_words(log):
    try:
        raise ValueError("secret")
    except ValueError as error:
        structlog.get_logger().error("x", exc_info=error)
        logging.getLogger("library").exception("y")
    ours, library = log()
    for event in (ours, library):
        assert event["exception"] == "ValueError"
        assert "test_logs.py" in event["frames"]
        assert "secret" not in json.dumps(event).replace('raise ValueError(\\"secret\\")', "")


def test_a_level_below_the_setting_is_silent(log):
    structlog.get_logger().debug("x")
    assert log() == []


def test_no_event_of_ours_carries_a_field_that_would_be_blanked():
    """A delivery's state was logged as `state`, and read `[redacted]` in every line."""
    blanked = []
    for path in (
        one for room in ("api", "worker", "d3serve", "model") for one in (ROOT / room).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
                fields = PRIVATE & {one.arg for one in node.keywords}
                blanked += [f"{path.name}:{node.lineno} {name}" for name in fields]
    assert blanked == []


@pytest.fixture
def service_log():
    """A process that logs in every way that there is to one that cannot be written, and then says that it lives."""
    code = (
        "import logging, os, sys, threading, traceback, warnings, structlog\n"
        "from rich.console import Console\n"
        "from d3serve import logs\n"
        "from d3serve.settings import Settings\n"
        "logs.Lossy.isatty = lambda _: sys.argv[1] == 'terminal'\n"
        "logs.configure_logging(Settings())\n"
        "for _ in range(3):\n"
        "    structlog.get_logger().info('x' * 10_000)\n"
        "    logging.getLogger('celery').error('y')\n"
        "    warnings.warn('z')\n"
        "    print('raw', file=sys.stderr)\n"
        "    Console(stderr=True).print('table')\n"
        "    traceback.print_stack()\n"
        "thread = threading.Thread(target=lambda: 1 / 0)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print('alive', flush=True)\n"
    )

    def run(redirection, reader):
        command = f"exec {shlex.join([sys.executable, '-c', code, reader])} {redirection}"
        return subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60, cwd=ROOT,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("reader", ["program", "terminal"])
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2> >(exec true)"])
def test_what_cannot_be_written_is_lost_and_nothing_else(service_log, redirection, reader):
    done = service_log(redirection, reader)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_whatever_is_said_in_a_service_is_json(service_log):
    done = service_log("2>&1 | grep -v '^{' ; true", "program")
    assert {line for line in done.stdout.splitlines() if not line.startswith(" ")} == {
        "raw",
        "table",
        "alive",
    }
