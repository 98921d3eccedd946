"""The main process's watch: half a second's rounds that repair what crashes and lost messages leave behind."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import structlog
from celery.worker import state as celery_state

from d3serve.errors import StorageUnavailable
from d3serve.schemas import Lane
from d3serve.settings import Settings
from d3serve.store.turns import TurnStore
from d3serve.wake.celery_app import WakeSender

EVERY_S = 0.5
ALIVE_EVERY_S = 5.0
ROUND_S = 2.0  # longer than a round takes while Redis answers
EX_SOFTWARE = 70

log = structlog.get_logger(__name__)


class Sweeper(threading.Thread):
    """Reaps leases, frees those of our own dead child at once, re-sends lost wakes, says that we live."""

    def __init__(
        self,
        store: TurnStore,
        settings: Settings,
        send_wake: WakeSender,
        *,
        child_pids: Callable[[], set[int]],
        stopping: Callable[[], bool],
    ) -> None:
        super().__init__(name="d3serve-sweeper", daemon=True)
        self._store = store
        self._settings = settings
        self._send_wake = send_wake
        self._child_pids = child_pids
        self._stopping = stopping
        self._halt = threading.Event()
        self._alive_at = 0.0
        self.gave_up: str | None = None  # why there is no model, and never will be

    def run(self) -> None:
        """Sweep until `finish`; a Redis that is away is waited for."""
        while not self._halt.wait(EVERY_S):
            try:
                self.sweep()
            except StorageUnavailable as error:
                log.warning("sweep.storage_away", error=error.message)
            except Exception as error:  # a thread's edge: without its sweeps a worker would seem dead
                log.error("sweep.failed", exc_info=error)

    def sweep(self) -> None:
        """One round."""
        if time.monotonic() - self._alive_at > ALIVE_EVERY_S:
            self._say_alive()
        self._free_orphans()
        reaped = self._store.reap()
        if reaped.leases or reaped.ended:
            log.warning("sweep.reaped", leases=reaped.leases, ended=reaped.ended)
        self._wake(reaped.wakes)
        self._check_load()

    def finish(self, store: TurnStore) -> None:
        """Stop sweeping, give back what is still leased, and leave the list of the living.

        `store` has little patience: leases and the sign of life run out by themselves, a host that stops waits for us.
        """
        self._halt.set()
        self.join(ROUND_S)  # a round that waits for Redis may be left behind
        try:
            for lease in store.own_leases():
                self._wake(store.free(lease, "back").wakes)
            store.retire()
        except StorageUnavailable as error:
            log.warning("sweep.storage_away", error=error.message)

    def _say_alive(self) -> None:
        self._store.publish(
            {"host": socket.gethostname(), "pid": os.getpid(), "lanes": ",".join(self._settings.lanes)}
        )
        self._alive_at = time.monotonic()

    def _free_orphans(self) -> None:
        """A dead child cannot renew, but its lease would last a while: end it now."""
        leases = self._store.own_leases()
        living = self._child_pids()  # asked last: a child that was started meanwhile may hold one of them
        for lease, pid in leases.items():
            if pid not in living:
                freed = self._store.free(lease, "back" if self._stopping() else "lost")
                log.warning("child.lost", pid=pid, jobs=freed.back, ended=freed.ended)
                self._wake(freed.wakes)

    def _check_load(self) -> None:
        load, reason = self._store.published("load", "error")
        if load == "failed" and self.gave_up is None:
            self.gave_up = reason or "no reason was told"
            log.error("model.gave_up", reason=reason)
            celery_state.should_stop = EX_SOFTWARE

    def _wake(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            self._send_wake(lane)
