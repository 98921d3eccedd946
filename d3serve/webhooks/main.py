"""The process `d3serve webhooks`."""

import asyncio
import signal

from d3serve.logs import configure_logging
from d3serve.settings import Settings
from d3serve.store.connect import check_server
from d3serve.tracing import start_tracing, stop_tracing
from d3serve.webhooks.egress import EgressPolicy
from d3serve.webhooks.outbound import Outbound
from d3serve.webhooks.outbox import HookStore
from d3serve.webhooks.sender import Sender

ANSWER_WITHIN_S = 15.0  # what a receiver may take; one that works longer should answer first


def webhooks_main(settings: Settings) -> int:
    """Run the sender until a signal stops it; the exit code.

    Raises:
        BrokerUnavailable: Redis does not answer, or may evict keys.
    """
    configure_logging(settings, process="webhooks")
    start_tracing("webhooks")
    check_server(settings)
    try:
        asyncio.run(_main(settings))
    finally:
        stop_tracing()
    return 0


async def _main(settings: Settings) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    store = HookStore.open(settings)
    outbound = Outbound(EgressPolicy(settings.webhook_allow), ANSWER_WITHIN_S)
    try:
        await Sender(store, outbound).run(stop)
    finally:
        await store.aclose()
