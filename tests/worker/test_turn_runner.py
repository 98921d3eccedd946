"""What a turn does not do: work that nobody wants any more, work without a lease, work without end."""

import itertools
import threading

import pytest

from d3serve.errors import DeviceError
from d3serve.settings import Settings
from d3serve.store.turns import ClaimedJob, Freed, Turn
from d3serve.worker.fake_engine import FakeEngine
from d3serve.worker.turn import MAX_ROUNDS, TurnRunner

QUESTIONS = '{"q":{"type":"noul"}}'


def job(name):
    """A claimed job with a state of its own."""
    return ClaimedJob(
        id=name, group=name, tenant="me", model="fake", attempt=1, state=f"={name}", questions=QUESTIONS,
        partial=False, asked_lane="", created_ms=0,
    )  # fmt: skip


class Store:
    """A job table that hands out one turn; notes what was committed and how the lease ended."""

    def __init__(self, *names):
        self.claimed, self.unwanted, self.joiners = [job(name) for name in names], set(), iter(())
        self.committed, self.freed, self.held = [], [], True
        self.refused = threading.Event()

    def claim(self, _pid):
        return Turn("lease", self.claimed)

    def progress(self, _lease, _stage, names):
        return set(names) - self.unwanted

    def renew(self, _lease):
        if not self.held:
            self.refused.set()
        return self.held

    def succeed(self, _lease, name, *_):
        self.committed.append(name)
        return True

    def more(self, _lease):
        return list(itertools.islice(self.joiners, 1))

    def free(self, _lease, mode, _warm):
        self.freed.append(mode)
        return Freed(0, 0, [])


class Engine(FakeEngine):
    """Runs `before` ahead of each pass."""

    before = staticmethod(lambda: None)

    def decide(self, jobs):
        self.before()
        return super().decide(jobs)


def run(store, before=lambda: None, **changes):
    engine = Engine.load("fake:")
    engine.before = before
    settings = Settings().model_copy(update={"max_batch_questions": 1, **changes})
    return TurnRunner(store, engine, settings, lambda _lane: None).run()


def test_a_job_that_is_unwanted_by_the_time_of_its_pass_is_not_decided():
    store = Store("a", "b", "c")
    run(store, lambda: store.unwanted.add("b"))
    assert (store.committed, store.freed) == (["a", "c"], ["back"])


def test_a_turn_stops_at_the_next_pass_once_its_lease_is_lost():
    store = Store("a", "b", "c")

    def lose():
        store.held = False
        assert store.refused.wait(5)
        for keeper in (one for one in threading.enumerate() if one.name == "d3serve-lease"):
            keeper.join(5)  # it leaves once it has taken note

    run(store, lose, lease_s=0.04)
    assert store.committed == ["a"]


def test_late_joiners_extend_a_turn_only_so_often():
    store = Store("first")
    store.joiners = (job(f"late {number}") for number in itertools.count())
    run(store)
    assert len(store.committed) == MAX_ROUNDS


def test_what_a_lost_device_took_with_it_counts_as_lost():
    store = Store("a")

    def fail():
        raise DeviceError("an illegal memory access")

    with pytest.raises(DeviceError):
        run(store, fail)
    assert (store.committed, store.freed) == ([], ["lost"])
