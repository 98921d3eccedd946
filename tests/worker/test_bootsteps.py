"""What we add to Celery's worker."""

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
