"""Between the steps of a long pass a worker sees whether it is still wanted, and lets short work overtake it."""

import math
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
# Of its own time a long pass may have paid so much in advance: short jobs that come close together wait for no step
# in between, as long as they come seldom.
CREDIT_S = 0.05
TELL_EVERY_S = (
    0.3  # each time is a write, and wakes whoever watches the job; a pace of shorter steps would be a guess
)
AWAY_S = 2.0  # before a Redis that failed is asked again; the device has work meanwhile

log = structlog.get_logger(__name__)


class PassEnded(Exception):  # no fault of anything
    """A pass ends before its end."""


class NobodyWaits(PassEnded):
    """None of a pass's jobs is wanted any more: canceled, expired, or taken away with the lease."""


class OutOfTime(PassEnded):
    """This process is to end before the pass would: its jobs go back unharmed."""


class Yields:
    """Called between the steps of one pass; raises PassEnded, which ends it.

    Args:
        wanted: whether any of its jobs still is.
        let_overtake: run a short turn, if there is one to run; whether there was. None: nobody is let past.
        tell: note the share of the jobs' work that is done, and the seconds that are left.
        fits: whether this process still has so many seconds.
        span: which share of the jobs' work was done before this pass, and which share it is.
    """

    def __init__(
        self,
        wanted: Callable[[], bool],
        let_overtake: Callable[[], bool] | None,
        tell: Callable[[float, float], object] = lambda _share, _eta_s: None,
        fits: Callable[[float], bool] = lambda _eta_s: True,
        span: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self._wanted = wanted
        self._let_overtake = let_overtake
        self._tell = tell
        self._fits = fits
        self._before, self._part = span
        self._paid_until = time.monotonic()
        self._ask_at = self._look_at = self._paid_until + LOOK_EVERY_S
        self._tell_at = self._paid_until + TELL_EVERY_S
        self._away_until = -math.inf
        self._first_at = self._first_share = 0.0  # when the first step had ended, and what was done by then
        self.others_s = 0.0  # what others' turns took

    def __call__(self, share: float) -> None:
        """Do what is due."""
        now = time.monotonic()
        if not self._first_at:
            self._first_at, self._first_share = now, share
        asks, spent_s = now >= self._ask_at, now - self._first_at
        if asks:
            self._ask_at = now + ASK_EVERY_S
            own_s = spent_s - self.others_s
            if not self._fits(self._left_s(share, own_s) if own_s >= TELL_EVERY_S else 0.0):
                raise OutOfTime
        if now < self._away_until:
            return
        try:
            if asks and not self._wanted():
                raise NobodyWaits
            if now >= self._tell_at and share > self._first_share:
                self._tell_at = now + TELL_EVERY_S
                self._tell(self._before + self._part * share, self._left_s(share, spent_s))
            if self._let_overtake is not None and now >= self._look_at:
                self._look(self._let_overtake)
        except (DeviceError, PassEnded):
            raise
        except Exception as error:  # what goes wrong beside a long pass is not its fault, and must not end it
            log.warning("beside.failed", error=type(error).__name__, exc_info=error)
            self._away_until = time.monotonic() + AWAY_S

    def _left_s(self, share: float, spent_s: float) -> float:
        """Seconds until the jobs' work is done, at the pace since the first step: before it, the pass was planned."""
        done = self._part * (share - self._first_share)
        return spent_s * (1 - self._before - self._part * share) / done if done else 0.0

    def _look(self, let_overtake: Callable[[], bool]) -> None:
        began = time.monotonic()
        overtook = let_overtake()
        now = time.monotonic()
        spent = now - began
        if not overtook:
            self._look_at = now + max(LOOK_EVERY_S, spent / LOOK_COST)
            return
        own = began - self.others_s  # a clock that stands while others overtake
        self.others_s += spent
        self._paid_until = max(self._paid_until, own - CREDIT_S) + spent * LONG_SHARE / (1 - LONG_SHARE)
        self._look_at = now + max(0.0, self._paid_until - own)
