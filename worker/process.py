"""The child process that holds the model: loads it once, then runs a turn for every wake-up."""

import os
import time

import structlog

from d3serve.celery_app import wake_sender
from d3serve.errors import DeviceError, StartupError, StorageUnavailable
from d3serve.settings import Settings
from d3serve.store.turns import TurnStore
from d3serve.worker.engines import Engine, load_engine
from d3serve.worker.turn import TurnReport, TurnRunner

MAX_LOADS = 3
SPEED_MEMORY = 0.8  # weight of the past in the moving average of tokens a second

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
        self._store.publish({"load": "loading", "child": os.getpid()})
        while self._store.count("loads") <= MAX_LOADS:
            began = time.monotonic()
            try:
                engine = load_engine(self._settings)
            except Exception as error:  # reported to the main process, which decides
                log.error("model.load_failed", exc_info=error)
                self._store.publish({"error": _reason(error)})
                if isinstance(error, StartupError):
                    break
            else:
                self._accept(engine, time.monotonic() - began)
                return
        self._store.publish({"load": "failed"})

    def _accept(self, engine: Engine, seconds: float) -> None:
        self._runner = TurnRunner(self._store, engine, self._settings, wake_sender(self._settings))
        model = engine.info.model_dump_json()
        self._store.publish({"load": "loaded", "loads": 0, "model": model, "error": ""})
        log.info("model.loaded", model=engine.info.name, device=engine.info.device, seconds=round(seconds, 1))

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
        self._store.count("turns")
        self._store.publish({"tokens_per_s": round(self._speed, 1), "progress": round(time.time() * 1000)})


def _reason(error: Exception) -> str:
    """What an operator reads; a StartupError is written for people, others show their type only."""
    return error.message if isinstance(error, StartupError) else f"{type(error).__name__}: {error}"
