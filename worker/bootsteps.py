"""What we add to Celery's worker."""

import heapq
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from celery import bootsteps
from celery.worker import state

CHECK_S = 0.25
SETTLED_EVERY_S = 10.0
HEARD_S = 5.0  # within which the event loop reads that a child has begun, however busy the host is
AGAIN_S = 0.1


class PoolWatch(bootsteps.StartStopStep):  # type: ignore[misc] # celery has no types
    """Looks after dead children often.

    Celery hears at once of the death of the first child only; that of a replacement it notices at its next
    round, which by itself comes every 5 s.
    """

    requires = ("celery.worker.components:Pool",)

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """Called by Celery each time its event loop starts; it forgets the timer when the loop ends."""
        hub.call_repeatedly(CHECK_S, worker.pool.maintain_pool)


class SettledTimers(bootsteps.StartStopStep):  # type: ignore[misc] # celery has no types
    """Throws away timers that were cancelled.

    Each wake-up sets one for its time limit, half an hour. Cancelled, it would be kept until it were due all the same:
    half a kilobyte a wake-up.
    """

    requires = ("celery.worker.components:Hub",)

    def register_with_event_loop(self, _worker: Any, hub: Any) -> None:
        """Called by Celery each time its event loop starts."""
        hub.call_repeatedly(SETTLED_EVERY_S, drop_settled, hub.timer)


def drop_settled(timer: Any) -> None:
    """Keep the entries that are still to come; in place, since the loop holds the list itself."""
    timer._queue[:] = [due for due in timer._queue if not due.entry.canceled]  # noqa: SLF001 # kombu has no other way
    heapq.heapify(timer._queue)  # noqa: SLF001


def controller_of(app: Any) -> Any:
    """The app's worker class, with an answer to whether it is stopping.

    A child that dies while its worker stops was stopped, not lost.
    """

    class Controller(app.Worker):  # type: ignore[misc] # celery has no types
        cold = False

        @property
        def stopping(self) -> bool:
            """True from the first signal on."""
            return self.cold or state.should_stop is not None or state.should_terminate is not None

        def install_platform_tweaks(self, worker: Any) -> None:
            """Celery's handlers of signals, of which SIGQUIT's waits until it knows what it ends."""
            super().install_platform_tweaks(worker)
            quit_ = signal.getsignal(signal.SIGQUIT)
            signal.signal(signal.SIGQUIT, until_heard(quit_))  # type: ignore[arg-type] # Celery's, a function

        def wait_for_soft_shutdown(self) -> None:
            """Note the signal: Celery itself sets its flag only after it has killed the child."""
            self.cold = True
            super().wait_for_soft_shutdown()

    return Controller


def until_heard(
    quit_: Callable[[int, FrameType | None], object],
) -> Callable[[int, FrameType | None], None]:
    """A cold shutdown that first lets the event loop read that a child has begun, if one was given a task.

    Celery gives a few seconds to the tasks that it knows to run, then ends them. One that it has not heard of yet it
    would let run to its end.
    """
    until, waits = 0.0, False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal until, waits
        until = until or time.monotonic() + HEARD_S
        if state.reserved_requests and not state.active_requests and time.monotonic() < until:
            if not waits:  # else this is somebody's second signal
                waits = True
                threading.Timer(AGAIN_S, again, (number,)).start()
        else:
            quit_(number, frame)

    def again(number: int) -> None:
        nonlocal waits
        waits = False
        os.kill(os.getpid(), number)

    return handle
