"""The next turn, claimed and tokenized shortly before the device has done with the one that runs."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import structlog

from d3serve.errors import StorageUnavailable

# How long before the pass's end the next turn is claimed: for as long as that took before, and half as long again.
FIRST_LEAD_S, LEAST_LEAD_S, MOST_LEAD_S = 0.02, 0.005, 0.2
LEAD = 1.5
MEMORY = 0.8  # weight of the past in the moving average of a pass's pace

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Ahead(Generic[T]):
    """Holds at most one turn. It is for the thread that runs the turns; what it claims it claims in one of its own.

    It claims late: what comes during a pass goes into the next one together, and no job waits here for longer than it
    takes to get it ready. So it must know how long a pass will take: as long as the last ones of about its size.

    Args:
        claim: claim a turn and get it ready; None if there is none.
    """

    def __init__(self, claim: Callable[[], T | None]) -> None:
        self._claim = claim
        self._thread = ThreadPoolExecutor(1, "d3serve-ahead")
        self._lead_s = FIRST_LEAD_S
        self._pace = dict[int, float]()  # seconds a token, by the bits of a pass's tokens
        self._tokens = 0  # of the pass that runs
        self._ended = threading.Event()
        self._next: Future[T | None] | None = None

    def begins(self, tokens: int) -> None:
        """A turn's last pass begins, of so many tokens: claim the next turn shortly before it ends."""
        self._tokens = tokens
        pace = self._pace.get(tokens.bit_length())
        if pace is None or self._next is not None:
            return
        self._ended = threading.Event()
        self._next = self._thread.submit(self._claim_late, self._ended, tokens * pace)

    def ends(self, seconds: float) -> None:
        """The pass has ended and has taken so long: what is not claimed yet is not claimed ahead."""
        self._ended.set()
        if self._tokens:
            pace, bits = seconds / self._tokens, self._tokens.bit_length()
            self._pace[bits] = MEMORY * self._pace.get(bits, pace) + (1 - MEMORY) * pace
            self._tokens = 0

    def has_turn(self) -> bool:
        """Whether there is a turn, once the pass is over; waits where it is being claimed."""
        self._ended.set()
        return self._next is not None and self._next.exception() is None and self._next.result() is not None

    def take(self) -> T | None:
        """The turn, if there is one; from now on another may be claimed."""
        claimed, self._next = self._next, None
        self._ended.set()
        try:
            return claimed.result() if claimed else None
        except StorageUnavailable as error:
            log.warning("ahead.storage_away", error=error.message)
        except Exception as error:  # a thread's edge: what was claimed has been given back
            log.error("ahead.failed", exc_info=error)
        return None

    def _claim_late(self, ended: threading.Event, pass_s: float) -> T | None:
        if ended.wait(max(0.0, pass_s - self._lead_s)):
            return None
        began = time.monotonic()
        if (claimed := self._claim()) is not None:
            took_s = LEAD * (time.monotonic() - began)
            self._lead_s = min(MOST_LEAD_S, max(LEAST_LEAD_S, took_s))
        return claimed
