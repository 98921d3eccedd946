"""What Celery calls. The module is imported by the main process too, so nothing here may import torch."""

import threading
from typing import Any

from celery import shared_task
from celery.signals import worker_process_init, worker_process_shutdown

from d3serve.logs import configure_logging
from d3serve.settings import Settings
from d3serve.tracing import start_tracing, stop_tracing
from d3serve.wake.celery_app import TURN_TASK
from d3serve.worker.process import TurnProcess

_process: list[TurnProcess] = []  # one in a child once it has started, none in the main process


@worker_process_init.connect(weak=False)  # type: ignore[untyped-decorator] # celery has no types
def start_process(sender: str, **_: Any) -> None:
    """Load the model in the fresh child; `sender` is the worker's name."""
    settings = Settings.load()
    configure_logging(settings, worker=sender)
    start_tracing("worker")
    process = TurnProcess(settings, sender)
    threading.Thread(target=process.stay_known, name="d3serve-alive", daemon=True).start()
    process.load()
    _process[:] = [process]


@worker_process_shutdown.connect(weak=False)  # type: ignore[untyped-decorator] # as above
def end_process(**_: Any) -> None:
    """Send the last spans."""
    stop_tracing()


@shared_task(name=TURN_TASK, ignore_result=True)  # type: ignore[untyped-decorator] # celery has no types
def turn() -> None:
    """Run a turn or more; the wake-up carries nothing, the job table says what to do."""
    for process in _process:
        process.run_turns()
