"""A worker: a main process that watches, and one child that holds the model and runs turns."""

import os
import secrets
import socket
import sys
import warnings
from collections.abc import Callable

import billiard
import structlog
from celery.platforms import SecurityWarning

from d3serve.errors import StartupError
from d3serve.logs import configure_logging
from d3serve.settings import Settings
from d3serve.store.connect import check_server
from d3serve.store.turns import TurnStore
from d3serve.wake.celery_app import POOL, Waker, make_app, queue_name, require_safe_pool
from d3serve.worker.bootsteps import PoolWatch, SettledTimers, controller_of
from d3serve.worker.stopping import tell_when_stopping
from d3serve.worker.sweeper import EX_SOFTWARE, Sweeper

log = structlog.get_logger(__name__)


def worker_main(settings: Settings, tell_why: Callable[[str], None] = lambda _: None) -> int:
    """Run one worker until a signal stops it; the exit code, 70 when the model could not be loaded.

    `tell_why` is called with the reason then, once.

    SIGTERM finishes the running turn first if `stop_grace_s` is enough, else gives its jobs back at once; SIGQUIT gives
    it 10 s.

    Raises:
        BrokerUnavailable: Redis does not answer, or may evict keys.
        StartupError: this host has no semaphores for Celery's pool.
    """
    name = f"d3@{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    configure_logging(settings, worker=name)
    check_server(settings)
    require_semaphores()
    os.environ.update(settings.to_env())  # the child reads its settings from there
    # Idle OpenMP threads of a CPU worker must sleep, not spin: beside another busy process a pass of the bundled
    # checkpoint took 3 s where it takes 40 ms.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.simplefilter("ignore", SecurityWarning)  # root is a risk with pickled messages; ours are JSON
    sys.__stdout__ = None  # type: ignore[misc] # where Celery says its farewell, which is no JSON
    app = make_app(settings)
    require_safe_pool(app)
    app.steps["worker"] |= {PoolWatch, SettledTimers}
    celery = controller_of(app)(
        hostname=name, pool_cls=POOL, concurrency=1, queues=[queue_name(lane) for lane in settings.lanes],
        without_gossip=True, without_mingle=True, without_heartbeat=True, quiet=True, loglevel="WARNING",
    )  # fmt: skip

    def child_pids() -> set[int]:
        pool = getattr(celery.pool, "_pool", None)
        return {child.pid for child in getattr(pool, "_pool", ())}

    tell_when_stopping(child_pids)
    sweeper = Sweeper(
        TurnStore.open(settings, name), settings, Waker(settings),
        child_pids=child_pids, stopping=lambda: bool(celery.stopping),
    )  # fmt: skip
    sweeper.start()
    try:
        celery.start()
    finally:
        sweeper.finish(TurnStore.open(settings, name, patience_s=1))
    if sweeper.gave_up is None:
        return int(celery.exitcode or 0)
    tell_why(sweeper.gave_up)
    return EX_SOFTWARE


def require_semaphores() -> None:
    """Return when processes of this host can share semaphores, which lie in /dev/shm.

    Raises:
        StartupError: that folder is missing, full or not to be written to.
    """
    try:
        billiard.get_context("spawn").Lock()
    except OSError as error:
        raise StartupError(
            f"no semaphore for the worker's processes: {error.strerror}; /dev/shm must be a tmpfs that this user may "
            "write to"
        ) from None
