"""What a worker does between the steps of a long pass: see whether it is still wanted, and let short work pass."""

import time
from collections.abc import Callable

import structlog

from d3serve.errors import DeviceError

# A step of a long pass takes 10 to 40 ms of an H200: to look more often than that gains nothing.
LOOK_EVERY_S = 0.01
LOOK_COST = 0.05  # of the time, at most, goes into looks that find nothing: one among 10,000 states takes milliseconds
ASK_EVERY_S = 0.1  # a canceled job frees the device within this and two steps
# What is left to a long pass under a flood of short work: it takes at most five times as long, so 18 s become 90 s, and
# a client who gave it a few minutes still gets its answers.
LONG_SHARE = 0.2
TELL_EVERY_S = 0.3  # each time is a write, and wakes whoever watches the job
AWAY_S = 1.0  # before a Redis that failed is asked again; the device has work meanwhile

log = structlog.get_logger(__name__)


class NobodyWaits(Exception):  # no fault of anything
    """None of a pass's jobs is wanted any more: canceled, expired, or taken away with the lease."""


class Yields:
    """Called between the steps of one pass; raises NobodyWaits, which ends it.

    Args:
        wanted: whether any of its jobs still is.
        tell: note the share of the work that is done, and the seconds that it took.
        let_pass: run a short turn, if there is one to run; whether there was. None: nobody is let past.
    """

    def __init__(
        self,
        wanted: Callable[[], bool],
        let_pass: Callable[[], bool] | None,
        tell: Callable[[float, float], object] = lambda _share, _spent_s: None,
    ) -> None:
        self._wanted = wanted
        self._tell = tell
        self._began = time.monotonic()
        self._tell_at = self._began + TELL_EVERY_S
        self._let_pass = let_pass
        self._ask_at = self._look_at = time.monotonic() + LOOK_EVERY_S
        self.others_s = 0.0  # what others' turns took

    def __call__(self, share: float) -> None:
        """Do what is due."""
        now = time.monotonic()
        try:
            if now >= self._ask_at:
                self._ask_at = now + ASK_EVERY_S
                if not self._wanted():
                    raise NobodyWaits
            if now >= self._tell_at and share > 0:
                self._tell_at = now + TELL_EVERY_S
                self._tell(share, now - self._began)
            if self._let_pass is not None and now >= self._look_at:
                self._look(self._let_pass)
        except (DeviceError, NobodyWaits):
            raise
        except Exception as error:  # what goes wrong beside a long pass is not its fault, and must not end it
            log.warning("beside.failed", error=type(error).__name__, exc_info=error)
            self._ask_at = self._look_at = time.monotonic() + AWAY_S

    def _look(self, let_pass: Callable[[], bool]) -> None:
        began = time.monotonic()
        passed = let_pass()
        now = time.monotonic()
        spent = now - began
        if passed:
            self.others_s += spent
        owed = spent * (LONG_SHARE / (1 - LONG_SHARE) if passed else 1 / LOOK_COST)
        self._look_at = now + max(LOOK_EVERY_S, owed)
