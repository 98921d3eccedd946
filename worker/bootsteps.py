"""What we add to Celery's worker."""

import heapq
from typing import Any

from celery import bootsteps
from celery.worker import state

CHECK_S = 0.25
SETTLED_EVERY_S = 10.0


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

        def wait_for_soft_shutdown(self) -> None:
            """Note the signal: Celery itself sets its flag only after it has killed the child."""
            self.cold = True
            super().wait_for_soft_shutdown()

    return Controller
