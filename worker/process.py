"""The child process that holds the model: loads it once, then runs a turn for every wake-up."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import structlog

from d3serve.errors import DeviceError, InvalidSettings, StartupError, StorageUnavailable
from d3serve.settings import Settings
from d3serve.store.counting import CountQueue
from d3serve.store.turns import CALLED, TurnStore
from d3serve.wake.celery_app import Waker, is_wake
from d3serve.worker.counting import Counter
from d3serve.worker.engines import load_engine, served_name
from d3serve.worker.memory import memory_of, peak_bytes
from d3serve.worker.turn import TurnReport, TurnRunner
from d3serve.worker.yields import OutOfTime

MAX_LOADS = 3
AWAY_S = 1.0
ALIVE_EVERY_S, MISSED_EVERY_S = 5.0, 0.5
STAY_S = 60.0  # Celery's limit of a task's time is for a turn that is stuck, not for many
WAIT_S = 0.5  # a process that is told to stop leaves within this
SPEED_MEMORY = 0.8  # weight of the past in the moving average of tokens a second
PEAK_MEMORY = 0.98  # turns of states that were cached say nothing of how fast others are read

T = TypeVar("T")
Told = dict[str, str | int | float]

log = structlog.get_logger(__name__)


class TurnProcess:
    """What lives as long as the child: store, engine, speed.

    The job table forgets a worker that it has not heard of for 30 s, and everybody where Redis loses its data. So what
    the child has told it tells again: every 5 s, as soon as it misses it, and before each turn, since by then another
    model may have got the queue.
    """

    def __init__(self, settings: Settings, worker: str) -> None:
        self._settings = settings
        self._store = TurnStore.open(settings, worker)
        self._runner: TurnRunner | None = None
        self._counter: Counter | None = None
        self._until = 0.0  # when the task that runs goes back to Celery
        self._speed = 0.0
        self._reading = 0.0
        self._said: Told = {}
        self._serves: str | None = None
        self._telling = threading.Lock()  # what is told last must be what is true

    def load(self) -> None:
        """Load the model and say so; never raises, since Celery would go on without a model.

        After a third failure, or one that cannot heal, it publishes `load=failed` and the main process ends.
        Loads that kill the child are counted too: the count lives in Redis until a load succeeds.
        """
        self._tell(load="loading", child=os.getpid())
        while self._patiently(lambda: self._store.count("loads")) <= MAX_LOADS:
            try:
                self._load_once()
            except DeviceError as error:
                log.error("device.lost", exc_info=error)
                os._exit(1)  # as in `run_turn`; a fresh process counts this load
            except Exception as error:  # reported to the main process, which decides
                self._tell(error=_reason(error))
                if isinstance(
                    error, StartupError
                ):  # written for people, who can do without where it was raised
                    log.error("model.load_failed", reason=error.message)
                    break
                log.error("model.load_failed", exc_info=error)
            else:
                return
        self._tell(load="failed")

    def _load_once(self) -> None:
        """Load the model, make what runs its turns, and say so; on any failure neither is kept."""
        began = time.monotonic()
        # Before minutes of reading weights: another model may have the queue.
        self._take_queue(served_name(self._settings), {"load": "loading"})
        engine = load_engine(self._settings)
        runner = TurnRunner(self._store, engine, self._settings, Waker(self._settings))
        counter = Counter(CountQueue.open(self._settings), engine, self._settings)
        self._store.serves, self._store.revision = engine.info.name, engine.info.revision or ""
        seconds = round(time.monotonic() - began, 1)
        told: Told = {"load": "loaded", "loads": 0, "model": engine.info.model_dump_json(), "error": ""}
        told |= {"cache_size_bytes": engine.cache_size_bytes, **memory_of(engine)}
        with self._telling:
            self._take_queue(engine.info.name, told)
            self._said |= told
            self._serves = engine.info.name
        runner.grace.listen()
        self._runner, self._counter = runner, counter
        counter.start()
        log.info("model.loaded", model=engine.info.name, device=engine.info.device, seconds=seconds)

    def _take_queue(self, model: str, told: Told) -> None:
        """Hold the queue for this model, and say so.

        Raises:
            InvalidSettings: a live worker holds it for another one.
        """
        if other := self._patiently(lambda: self._store.serve(model, told)):
            raise _taken(model, other, self._settings.namespace)

    def _tell(self, **fields: str | int) -> None:
        with self._telling:
            self._said |= fields
            self._patiently(lambda: self._store.publish(fields))

    def stay_known(self) -> None:
        """For a thread beside the turns: tell again what was told, for as long as the process lives."""
        told_at = time.monotonic()
        while True:
            time.sleep(MISSED_EVERY_S)  # who is forgotten comes back before another model can take the queue
            try:
                if time.monotonic() - told_at > ALIVE_EVERY_S or self._store.published("child") == [None]:
                    self._tell_again()
                    told_at = time.monotonic()
            except StorageUnavailable as error:
                log.warning("alive.storage_away", error=error.message)
            except Exception as error:  # a thread's edge: without it a worker would seem to load for ever
                log.error("alive.failed", exc_info=error)

    def _tell_again(self) -> bool:
        """Repeat all that was told; False when there is no model to run a turn with.

        A worker that was away for too long may find that another model has the queue by now. It must not answer a
        single job, and ends as it would have if it had come second at the start.
        """
        with self._telling:
            self._said |= self._busy()  # a long pass counts while it runs
            if self._serves is None:
                if self._said:
                    self._store.publish(self._said)
                return False
            other = self._store.serve(self._serves, self._said)
            if other is None:
                return True
            self._runner, reason = None, _taken(self._serves, other, self._settings.namespace).message
            if self._counter is not None:
                self._counter.stop()
            self._serves, self._said = None, self._said | {"load": "failed", "error": reason}
            log.error("model.displaced", reason=reason)
            self._store.publish(self._said)
            return False

    def _patiently(self, call: Callable[[], T]) -> T:
        """Do it, however long Redis is away: without it this process is of no use."""
        while True:
            try:
                return call()
            except StorageUnavailable as error:
                log.warning("load.storage_away", error=error.message)
                time.sleep(AWAY_S)

    def run_turns(self) -> None:
        """Run a turn, and for a while all that follow; the process ends here when the device is lost.

        A wake-up takes milliseconds of whoever sends it, and again through Celery's main process. So this one then
        waits for work itself, and is called by whoever brings some: SUBMIT does it in the same step.
        """
        self._until = time.monotonic() + STAY_S
        try:
            while (self._run_turn() or self._is_called()) and self._stays:
                pass
            called = self._store.wait_no_longer()
            if self._runner is not None:
                self._runner.leave()
                self._runner.wake(called)
        except DeviceError as error:
            log.error("device.lost", exc_info=error)
            os._exit(1)  # the main process starts a fresh one; nothing here may touch the device again
        except StorageUnavailable as error:
            log.warning("turn.storage_away", error=error.message)
        except OutOfTime:
            log.warning("stop.gives_back")

    @property
    def _stays(self) -> bool:
        """Whether this task goes on: there is a model, and time."""
        return self._runner is not None and not self._runner.grace.stopping and time.monotonic() < self._until

    def _is_called(self) -> bool:
        """Wait until there may be work, if this task goes on for so long."""
        while self._stays:
            message = self._store.wait_for_call(WAIT_S)
            if message is not None:
                if message != CALLED and not is_wake(message):  # and is taken for one: a turn does no harm
                    log.warning("wake.unreadable", error="NoWake")
                return True
        return False

    def _run_turn(self) -> bool:
        """Run one turn, if there is a model and work; whether there was."""
        if self._runner is None:
            return False
        report = self._runner.run()
        if not report.known and self._tell_again():
            report = self._runner.run()
        if report.jobs:
            self._publish(report)
        return bool(report.jobs)

    def _busy(self) -> Told:
        return {"busy_s": round(self._runner.busy.seconds, 3)} if self._runner else {}

    def _publish(self, report: TurnReport) -> None:
        now = report.work_tokens / report.seconds
        self._speed = SPEED_MEMORY * self._speed + (1 - SPEED_MEMORY) * now if self._speed else now
        self._reading = max(PEAK_MEMORY * self._reading, self._store.take_read_tokens() / report.seconds)
        speeds: Told = {
            "tokens_per_s": round(self._speed, 1),
            "read_tokens_per_s": round(self._reading, 1),
            "cached_states": report.cached_states,
            "cached_bytes": report.cached_bytes,
            **self._busy(),
            "peak_memory_bytes": peak_bytes(),
            **report.memory,
        }
        with suppress(StorageUnavailable), self._telling:  # the work is done; only its echo is lost
            self._said |= speeds
            self._store.publish(speeds)


def _taken(model: str, other: tuple[str, str], namespace: str) -> InvalidSettings:
    return InvalidSettings(
        f"worker {other[0]} serves {other[1]} from the queue {namespace!r}, and a queue has one model: "
        f"give {model} a D3SERVE_NAMESPACE of its own, or stop that worker first",
        field="model",
    )


def _reason(error: Exception) -> str:
    """What an operator reads; a StartupError is written for people, others show their type only."""
    return error.message if isinstance(error, StartupError) else f"{type(error).__name__}: {error}"
