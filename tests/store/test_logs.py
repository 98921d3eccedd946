"""Logs are one event a line and hold no client's text."""

import io
import json
import logging
import sys

import pytest
import structlog

from d3serve.logs import configure_logging
from d3serve.settings import Settings


@pytest.fixture
def log(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    configure_logging(Settings(log_format="json"), worker="w")
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
