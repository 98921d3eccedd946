"""Logs of every process: one event a line, JSON or for a terminal, and never the text of a state or an answer."""

import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any

import structlog

from d3serve.settings import Settings

# What clients wrote and what the model said about it. An event that carries such a field loses the value.
PRIVATE = frozenset(
    {"state", "questions_text", "instructions", "criteria", "answer", "answers", "body", "result"}
)
REDACTED = "[redacted]"
LIBRARIES = ("celery", "kombu", "uvicorn.error")

Event = MutableMapping[str, Any]


def redact(_logger: object, _method: str, event: Event) -> Event:
    """Blank private fields."""
    for name in PRIVATE & event.keys():
        event[name] = REDACTED
    return event


def frames_only(_logger: object, _method: str, event: Event) -> Event:
    """Show where an exception came from and its type; its message may quote a client's text."""
    info = event.pop("exc_info", None)
    if info:
        error = info if isinstance(info, BaseException) else sys.exc_info()[1]
        if error is not None:
            event["exception"] = type(error).__name__
            event["frames"] = "".join(traceback.format_tb(error.__traceback__))
    return event


def configure_logging(settings: Settings, **bound: str) -> None:
    """Set up structlog and the libraries' loggers for this process; every event carries `bound`."""
    level = getattr(logging, settings.log_level.upper())
    as_json = settings.log_format == "json" or (settings.log_format is None and not sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
        frames_only,
    ]
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**bound)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("d3serve").setLevel(level)  # ours: rooms that know nothing of structlog
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(
            max(level, logging.INFO if name == "uvicorn.error" else logging.WARNING)
        )
