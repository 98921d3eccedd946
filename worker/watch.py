"""What a worker does before each pass of a turn, and between the steps of a long one."""

import time
from collections.abc import Callable, Collection, Sequence

import structlog

from d3serve.model.deciding import Watch
from d3serve.store.turns import TurnStore
from d3serve.worker.lease import LeaseKeeper
from d3serve.worker.stopping import Grace
from d3serve.worker.yields import NobodyWaits, OutOfTime, Yields

log = structlog.get_logger(__name__)


class Busy:
    """Seconds that passes have taken, without what ran between their steps; never less than before."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def begins(self) -> None:
        """A pass begins, or goes on."""
        self._since = time.monotonic()

    def pauses(self) -> None:
        """It ends, or lets others run."""
        self.seconds += time.monotonic() - self._since


class PassWatch(Watch):
    """Notes in the job table which jobs a pass is for and how far it is, and asks it which are still wanted.

    Args:
        keeper: of the turn's lease.
        grace: the time that this process has left.
        ids: the jobs' ids, in the order in which the engine has them.
        between: called between two passes of one large job: others have their turn.
        let_overtake: between two steps, with the ids of the pass: run a short turn, if there is one; whether there was.
            None: nobody is let past.
        last_begins: called with the jobs of the last pass before it begins, if it is the only one of each of them.
        busy: counts the seconds of passes.
        ended: called with the jobs of each pass, and when it began and ended.
    """

    def __init__(
        self,
        store: TurnStore,
        keeper: LeaseKeeper,
        grace: Grace,
        ids: Sequence[str],
        *,
        between: Callable[[], object],
        let_overtake: Callable[[Sequence[str]], bool] | None,
        last_begins: Callable[[Sequence[int]], object],
        busy: Busy,
        ended: Callable[[Sequence[int], tuple[float, float]], object],
    ) -> None:
        self._store, self._keeper, self._grace, self._ids = store, keeper, grace, ids
        self._between, self._let_overtake, self._last_begins = between, let_overtake, last_begins
        self._busy, self._ended, self._pass_began = busy, ended, 0.0
        self._begun = set[int]()
        self._yields: Yields | None = None

    def starts(self, jobs: Sequence[int], done: float, part: float) -> Collection[int]:
        """Say that these jobs are decided now; those that are neither done nor taken away.

        Raises:
            OutOfTime: this process is to end.
        """
        if not self._grace.fits():
            raise OutOfTime
        whole = self._begun.isdisjoint(jobs) and part == 1
        if not self._begun.isdisjoint(jobs):
            self._between()
        self._begun.update(jobs)
        if self._keeper.lost:
            return ()
        wanted = self._store.progress(self._keeper.lease, "deciding", [self._ids[job] for job in jobs])
        found = [job for job in jobs if self._ids[job] in wanted]
        self._yields = self._between_steps([self._ids[job] for job in found], (done, part))
        if whole and len(self._begun) == len(self._ids):
            self._last_begins(found)
        self._pass_began = time.time()
        self._busy.begins()
        return found

    def ends(self, jobs: Sequence[int]) -> None:
        """Count the pass's time, and tell of it."""
        self._busy.pauses()
        self._ended(jobs, (self._pass_began, time.time()))

    def goes_on(self, share: float) -> bool:
        """Do what is due between two steps.

        Raises:
            OutOfTime: this process is to end before the pass.
        """
        self._busy.pauses()
        try:
            if self._yields is not None:
                self._yields(share)
        except NobodyWaits:
            return False
        finally:
            self._busy.begins()
        return True

    def tries_again(self, jobs: Sequence[int], error: Exception) -> None:
        """Say so in the log: whose fault it was is told once it is known."""
        log.warning("pass.halved", jobs=len(jobs), error=type(error).__name__)

    def _between_steps(self, ids: Sequence[str], span: tuple[float, float]) -> Yields:
        store, keeper, let_overtake = self._store, self._keeper, self._let_overtake
        return Yields(
            lambda: not keeper.lost and not store.held(keeper.lease).isdisjoint(ids),
            (lambda: let_overtake(ids)) if let_overtake else None,
            lambda share, eta_s: store.note_share(keeper.lease, ids, share, eta_s),
            self._grace.fits,
            span,
        )
