"""Threads that nobody waits for at the end."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import Any


class AbandonedThreads(ThreadPoolExecutor):
    """An executor for an event loop whose end, as by an interrupt, waits for no thread.

    The standard one waits for all as the loop closes, and again as the interpreter ends: for a name server or a network
    drive that does not answer. Every call has a thread of its own here, so whoever calls bounds their number.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in a thread that may be left behind."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def call() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # whoever waits gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        Thread(target=call, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to do: the threads end by themselves, or with the process."""
