"""What we add to Celery's worker."""

import asyncio

import pytest
from kombu.asynchronous.timer import Timer

from d3serve.worker.bootsteps import drop_settled


def test_a_cancelled_timer_is_not_kept_until_it_is_due():
    timer, rang = Timer(), []
    entries = [timer.call_after(1_800 + i, rang.append, (i,)) for i in range(100)]
    soon = timer.call_after(-1, rang.append, ("soon",))
    for entry in entries[10:]:
        entry.cancel()
    drop_settled(timer)
    assert len(timer) == 11
    wait_s, entry = next(iter(timer))
    assert (wait_s, entry) == (None, soon)


WATCH = """
import threading, time
from kombu.asynchronous import get_event_loop
from d3serve.worker import bootsteps
bootsteps.SETTLED_EVERY_S = 0.2
def watch():
    while True:
        time.sleep(0.05)
        if hub := get_event_loop():
            open({path!r}, "w").write(str(len(hub.timer)))
threading.Thread(target=watch, daemon=True).start()
"""


@pytest.mark.anyio
async def test_wake_ups_leave_no_timers_behind(service, tmp_path):
    path = tmp_path / "timers"
    service.start_worker(prelude=WATCH.format(path=str(path)))
    await service.ready()
    for number in range(60):
        await service.finish(await service.submit(f"state {number}"))
    async with asyncio.timeout(60):
        while int(path.read_text() or 60) > 30:  # noqa: ASYNC110 # a dozen are Celery's and kombu's own
            await asyncio.sleep(0.05)
