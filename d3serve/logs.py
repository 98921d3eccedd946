"""Logs of every process: one event a line, JSON or for a terminal, and never the text of a state or an answer."""

import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import MutableMapping
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

import structlog

from d3serve.settings import Settings

# What clients wrote and what the model said about it. An event that carries such a field loses the value.
PRIVATE = frozenset(
    {"state", "questions_text", "instructions", "criteria", "answer", "answers", "body", "result"}
)
REDACTED = "[redacted]"
STDERR = 2
LIBRARIES = ("celery", "kombu", "uvicorn.error")

EventDict = MutableMapping[str, Any]


def redact(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Blank private fields."""
    for name in PRIVATE & event.keys():
        event[name] = REDACTED
    return event


def frames_only(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Show where an exception came from and its type; its message may quote a client's text."""
    info = event.pop("exc_info", None)
    if info:
        error = info if isinstance(info, BaseException) else sys.exc_info()[1]
        if error is not None:
            event["exception"] = type(error).__name__
            event["frames"] = "".join(traceback.format_tb(error.__traceback__))
    return event


class Lossy(io.TextIOBase):
    """A stream that loses what cannot be written: a full disk or a closed pipe of the log must stop no work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Write, or lose, the text."""
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is kept back, or lose it."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def fileno(self) -> int:
        """The stream's descriptor."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether somebody reads along."""
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override] # a plain attribute in typeshed
        """As Rich asks for it, to know which signs it may draw."""
        return self._stream.encoding


def write_or_lose() -> None:
    """From now on nothing that this process writes to standard error can raise, whoever writes it."""
    if sys.stderr is None:  # it was closed: whatever is opened next would get its number, and be written to
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
        os.set_inheritable(STDERR, True)
        sys.stderr = os.fdopen(STDERR, "w")
    if not isinstance(sys.stderr, Lossy):
        sys.stderr = Lossy(sys.stderr)


def configure_logging(settings: Settings, **bound: str) -> None:
    """Set up structlog and the libraries' loggers for this process; every event carries `bound`."""
    write_or_lose()
    level = getattr(logging, settings.log_level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
        frames_only,
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
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
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda about: _log_uncaught(about.exc_type, about.exc_value, about.exc_traceback)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.getLogger("multiprocessing").handlers[:] = [
        handler
    ]  # billiard's, which hands nothing to the root
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("d3serve").setLevel(level)  # ours: rooms that know nothing of structlog
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(
            max(level, logging.INFO if name == "uvicorn.error" else logging.WARNING)
        )


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, _trace: TracebackType | None = None
) -> None:
    structlog.get_logger(__name__).error("uncaught", kind=kind.__name__, exc_info=error)
