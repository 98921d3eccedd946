"""How a child hears that its worker stops, and how much time is left to it then."""

import math
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType

import structlog
from celery.signals import worker_shutting_down

# Celery lets a child finish its task and tells it nothing. SIGTERM would end it, SIGUSR1 is Celery's soft time limit.
STOP_SIGNAL = signal.SIGUSR2

log = structlog.get_logger(__name__)


def tell_when_stopping(child_pids: Callable[[], Collection[int]]) -> None:
    """In the main process, before it has children: from now on a shutdown is told to them as it begins."""
    signal.signal(
        STOP_SIGNAL, signal.SIG_IGN
    )  # a child inherits it: one that still starts must not die of the signal

    @worker_shutting_down.connect(weak=False)  # type: ignore[untyped-decorator] # celery has no types
    def tell(**_: object) -> None:
        for pid in child_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, STOP_SIGNAL)


class Grace:
    """The time that a process has left: all of it until it is told to stop, then `grace_s`."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._until = math.inf
        self._said = False

    def listen(self) -> None:
        """In a child: take the signal; from the main thread."""
        signal.signal(STOP_SIGNAL, self._stop)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._until = min(self._until, time.monotonic() + self._grace_s)

    @property
    def stopping(self) -> bool:
        """Whether the process was told to stop: it takes no new work."""
        return self._until < math.inf

    def fits(self, eta_s: float = 0.0) -> bool:
        """Whether so many seconds are left; says once in the log that a process that stops goes on for so long."""
        left_s = self._until - time.monotonic()
        if self.stopping and eta_s and eta_s <= left_s and not self._said:
            self._said = True
            log.info("stop.finishes", eta_s=round(eta_s, 1), left_s=round(left_s, 1))
        return eta_s <= left_s
