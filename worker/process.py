"""The child process that holds the model: loads it once, then runs a turn for every wake-up."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import structlog

from d3serve.celery_app import Waker
from d3serve.errors import DeviceError, InvalidSettings, StartupError, StorageUnavailable
from d3serve.settings import Settings
from d3serve.store.turns import TurnStore
from d3serve.worker.engines import load_engine
from d3serve.worker.turn import TurnReport, TurnRunner

MAX_LOADS = 3
AWAY_S = 1.0
SPEED_MEMORY = 0.8  # weight of the past in the moving average of tokens a second

T = TypeVar("T")

log = structlog.get_logger(__name__)


class TurnProcess:
    """What lives as long as the child: store, engine, speed."""

    def __init__(self, settings: Settings, worker: str) -> None:
        self._settings = settings
        self._store = TurnStore.open(settings, worker)
        self._runner: TurnRunner | None = None
        self._speed = 0.0

    def load(self) -> None:
        """Load the model and say so; never raises, since Celery would go on without a model.

        After a third failure, or one that cannot heal, it publishes `load=failed` and the main process ends.
        Loads that kill the child are counted too: the count lives in Redis until a load succeeds.
        """
        self._tell(load="loading", child=os.getpid())
        while self._patiently(lambda: self._store.count("loads")) <= MAX_LOADS:
            try:
                self._load_once()
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
        engine = load_engine(self._settings)
        runner = TurnRunner(self._store, engine, self._settings, Waker(self._settings))
        seconds = round(time.monotonic() - began, 1)
        told: dict[str, str | int] = {
            "load": "loaded",
            "loads": 0,
            "model": engine.info.model_dump_json(),
            "error": "",
        }
        if other := self._patiently(lambda: self._store.serve(engine.info.name, told)):
            raise InvalidSettings(
                f"worker {other[0]} serves {other[1]} from the queue {self._settings.namespace!r}, and a queue has one "
                f"model: give {engine.info.name} a D3SERVE_NAMESPACE of its own, or stop that worker first",
                field="model",
            )
        self._runner = runner
        log.info("model.loaded", model=engine.info.name, device=engine.info.device, seconds=seconds)

    def _tell(self, **fields: str | int) -> None:
        self._patiently(lambda: self._store.publish(fields))

    def _patiently(self, call: Callable[[], T]) -> T:
        """Do it, however long Redis is away: without it this process is of no use."""
        while True:
            try:
                return call()
            except StorageUnavailable as error:
                log.warning("load.storage_away", error=error.message)
                time.sleep(AWAY_S)

    def run_turn(self) -> None:
        """Run one turn, if there is a model and work; the process ends here when the device is lost."""
        if self._runner is None:
            return
        try:
            report = self._runner.run()
        except DeviceError as error:
            log.error("device.lost", exc_info=error)
            os._exit(1)  # the main process starts a fresh one; nothing here may touch the device again
        except StorageUnavailable as error:
            log.warning("turn.storage_away", error=error.message)
            return
        if report.jobs:
            self._publish(report)

    def _publish(self, report: TurnReport) -> None:
        now = report.work_tokens / report.seconds
        self._speed = SPEED_MEMORY * self._speed + (1 - SPEED_MEMORY) * now if self._speed else now
        with suppress(StorageUnavailable):  # the work is done; only its echo is lost
            self._store.publish({"tokens_per_s": round(self._speed, 1)})


def _reason(error: Exception) -> str:
    """What an operator reads; a StartupError is written for people, others show their type only."""
    return error.message if isinstance(error, StartupError) else f"{type(error).__name__}: {error}"
