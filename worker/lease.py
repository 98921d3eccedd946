"""Keeps a turn's lease while the turn runs."""

import threading
import types
from typing import Self

import structlog

from d3serve.errors import StorageUnavailable
from d3serve.store.turns import TurnStore

log = structlog.get_logger(__name__)


class LeaseKeeper:
    """Renews a lease from a thread, four times in its life; `lost` tells that it has ended regardless.

    A turn whose lease is lost should stop at the next chance: its commits will be refused.
    """

    def __init__(self, store: TurnStore, lease: str) -> None:
        self.lost = False
        self._store = store
        self.lease = lease
        self._every_s = store.lease_s / 4
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="d3serve-lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.lost = not self._store.renew(self.lease)
            except StorageUnavailable:
                continue
            if self.lost:
                log.warning("lease.lost", lease=self.lease)
                return
