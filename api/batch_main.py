"""The process `d3serve batches`."""

import asyncio
import contextlib
import signal

from d3serve.api.batch_feeder import Feeder
from d3serve.logs import configure_logging
from d3serve.settings import Settings
from d3serve.store.batches import BatchStore
from d3serve.store.connect import check_server
from d3serve.store.jobs import JobStore
from d3serve.tracing import start_tracing, stop_tracing
from d3serve.wake.celery_app import Waker


def batches_main(settings: Settings) -> int:
    """Run the feeder until a signal stops it; the exit code.

    Raises:
        BrokerUnavailable: Redis is too old, or may evict keys; for one that does not answer it waits.
    """
    configure_logging(settings, process="batches")
    start_tracing("batches")
    check_server(settings, may_be_away=True)  # the feeder waits for it
    try:
        asyncio.run(_main(settings))
    finally:
        stop_tracing()
    return 0


async def _main(settings: Settings) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with contextlib.closing(Waker(settings)) as waker:
        async with JobStore.open(settings) as jobs, contextlib.aclosing(BatchStore.open(settings)) as batches:
            await Feeder(batches, jobs, settings, waker).run(stop)
