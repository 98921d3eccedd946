"""How long passes took is told while they run: without what ran between their steps, and never less than before."""

from types import SimpleNamespace

import pytest

from d3serve.worker import watch as watch_module
from d3serve.worker.watch import Busy, PassWatch


class Clock:
    """A time that only moves when somebody works; as monotonic clock and as that of the wall."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(watch_module, "time", made)
    return made


def watch_of(busy, ended, let_overtake=None):
    """The watch of one job's passes, where nobody else wants anything."""
    store = SimpleNamespace(
        progress=lambda _lease, _stage, ids: set(ids), held=lambda _lease: {"a"}, note_share=lambda *_: None
    )
    keeper = SimpleNamespace(lost=False, lease="l")
    grace = SimpleNamespace(fits=lambda *_: True)
    made = PassWatch(
        store, keeper, grace, ["a"], between=lambda: None, let_overtake=None, last_begins=lambda _: None,
        busy=busy, ended=lambda jobs, during: ended.append((jobs, during)),
    )  # fmt: skip
    if let_overtake is not None:
        made._between_steps = lambda *_: lambda _share: let_overtake()
    return made


def test_a_long_pass_counts_at_each_step_and_a_short_one_beside_it_once(clock):
    busy, ended, seen = Busy(), [], []

    def short_pass():
        seen.append(busy.seconds)
        clock.now += 10  # a claim, which is no pass
        watch = watch_of(busy, ended)
        watch.starts([0], 0, 1)
        clock.now += 1
        watch.ends([0])
        seen.append(busy.seconds)

    watch = watch_of(busy, ended, short_pass)
    watch.starts([0], 0, 1)
    clock.now += 2
    assert watch.goes_on(0.5)
    clock.now += 3
    watch.ends([0])
    assert seen == [2, 3]
    assert busy.seconds == 6
    assert ended == [([0], (1012, 1013)), ([0], (1000, 1016))]
