"""What we add to Celery's worker."""

from typing import Any

from celery import bootsteps

CHECK_S = 0.25


class PoolWatch(bootsteps.StartStopStep):  # type: ignore[misc] # celery has no types
    """Looks after dead children often.

    Celery hears at once of the death of the first child only; that of a replacement it notices at its next
    round, which by itself comes every 5 s.
    """

    requires = ("celery.worker.components:Pool",)

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """Called by Celery each time its event loop starts; it forgets the timer when the loop ends."""
        hub.call_repeatedly(CHECK_S, worker.pool.maintain_pool)
