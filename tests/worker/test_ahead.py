"""The next turn is claimed and tokenized while a short pass runs; it is given back where it cannot follow."""

import dataclasses
import threading
import time

import pytest

from d3serve.errors import StorageUnavailable
from d3serve.settings import Settings
from d3serve.store.turns import ClaimedJob, Freed, Turn
from d3serve.worker import ahead
from d3serve.worker.fake_engine import FakeEngine
from d3serve.worker.turn import TurnRunner

IN_TIME_S = 30


def job(name, **changes):
    """A claimed job with a state of its own."""
    fields = {
        "id": name, "group": name, "tenant": "me", "model": "fake", "attempt": 1, "state": f"={name}",
        "questions": '{"q":{"type":"noul"}}', "partial": False, "asked_lane": "interactive", "created_ms": 0,
    }  # fmt: skip
    return ClaimedJob(**fields | changes)


class Store:
    """A job table that hands out one job a claim, and notes what happens to it, in order."""

    lease_s, max_batch_questions = 60.0, 100

    def __init__(self, *jobs):
        self.waiting, self.seen = list(jobs), []
        self.ready = threading.Event()  # what is claimed ahead

    def interactive_waits(self):
        return bool(self.waiting)

    def claim(self, _pid, *, ahead=False, **_):
        taken = [self.waiting.pop(0)] if self.waiting else []
        if taken:
            self.seen.append(f"{'ahead' if ahead else 'claim'} {taken[0].id}")
        return Turn(taken[0].id if taken else "none", taken)

    def progress(self, _lease, _stage, names):
        return set(names)

    def held(self, lease):
        return {lease}

    def renew(self, _lease):
        return True

    def more(self, lease):
        self.seen.append(f"more {lease}")
        return []

    def succeed_all(self, _lease, successes, _identity):
        self.seen += [f"commit {each.job_id}" for each in successes]
        return [True] * len(successes)

    def fail(self, _lease, name, _error):
        self.seen.append(f"fail {name}")
        self.ready.set()
        return True

    def free(self, lease, mode, _warm, _spent):
        self.seen.append(f"{mode} {lease}")
        return Freed(0, 0, [])


class Engine(FakeEngine):
    """Its passes wait for what a test says, and it notes what it tokenizes and where."""

    meanwhile = staticmethod(lambda _name: None)

    def prepare(self, state, *given, **options):
        prepared = super().prepare(state, *given, **options)
        self.store.seen.append(f"prepare {state}")
        if threading.current_thread() is not threading.main_thread():
            self.store.ready.set()
        return prepared

    def _pass(self, in_pass, asked, tell):
        name = in_pass[0].job.state.strip('"')
        self.store.seen.append(f"pass {name}")
        self.meanwhile(name)
        super()._pass(in_pass, asked, tell)


@pytest.fixture
def make(monkeypatch):
    """A runner on a store, whose engine needs as long for `slow` as it takes until something was claimed ahead."""
    monkeypatch.setattr(ahead, "FIRST_LEAD_S", 5.0)  # at once, once it is known how long a pass takes

    def make(store, model="fake:?question_ms=1", slow="b"):
        engine = Engine.load(model)
        engine.store = store
        engine.meanwhile = lambda name: name == slow and store.ready.wait(IN_TIME_S)
        return TurnRunner(store, engine, Settings(), lambda _lane: None)

    return make


def turns(runner, count):
    return [runner.run().jobs for _ in range(count)]


def test_the_next_turn_is_ready_before_the_pass_has_ended_and_follows_it(make):
    store = Store(job("a"), job("b"), job("c"))
    assert turns(make(store), 3) == [1, 1, 1]
    events = store.seen
    assert events.index("ahead c") > events.index("prepare b")
    assert events.index("prepare c") < events.index("commit b"), "tokenized before anything else happened"
    assert "claim c" not in events
    assert "more b" not in events, "late joiners would make what is claimed wait"
    assert events[-3:] == ["commit c", "more c", "back c"]


def test_of_a_pass_of_unknown_length_nothing_is_claimed_ahead(make):
    store = Store(job("a"), job("b" * 4000), job("c"))
    turns(make(store, slow=""), 3)
    assert [event for event in store.seen if event.startswith("ahead")] == []


def test_what_comes_during_a_pass_is_claimed_together_shortly_before_its_end(make, monkeypatch):
    monkeypatch.setattr(ahead, "FIRST_LEAD_S", 0.005)
    store, began = Store(job("a"), job("b"), job("c")), []
    runner = make(store, "fake:?question_ms=400")
    claim = store.claim

    def noted(*given, **options):
        began.append(time.monotonic())
        return claim(*given, **options)

    store.claim = noted
    turns(runner, 3)
    assert "ahead c" in store.seen
    assert began[2] - began[1] > 0.2, "a pass takes 0.4 s at least"


@pytest.mark.parametrize(
    "slow", [job("b", asked_lane="offline"), job("b", state="=" + "b" * 12_000)], ids=["offline", "long"]
)
def test_nothing_waits_behind_a_pass_that_short_work_may_overtake(make, slow):
    first = dataclasses.replace(slow, id="a", group="a")
    store = Store(first, slow, job("c"))
    turns(make(store, "fake:?question_ms=20&yield_ms=5&cache=0", slow=""), 3)
    assert [event for event in store.seen if event.startswith("ahead")] == []


def test_a_worker_that_stops_gives_back_what_it_has_claimed(make):
    store = Store(job("a"), job("b"), job("c"))
    runner = make(store)
    turns(runner, 2)
    runner.grace._stop(0, None)
    assert turns(runner, 1) == [0]
    assert store.seen[-1] == "back c"
    assert "pass c" not in store.seen


def test_a_process_that_goes_back_to_celery_gives_back_what_it_has_claimed(make):
    store = Store(job("a"), job("b"), job("c"))
    runner = make(store)
    turns(runner, 2)
    runner.leave()
    assert store.seen[-1] == "back c"
    runner.leave()
    assert store.seen.count("back c") == 1


def test_a_turn_that_redis_breaks_off_takes_what_is_claimed_ahead_with_it(make):
    store = Store(job("a"), job("b"), job("c"))
    runner = make(store)
    turns(runner, 1)
    done = store.succeed_all

    def away(*_):
        raise StorageUnavailable("Redis does not answer")

    store.succeed_all = away
    with pytest.raises(StorageUnavailable):
        runner.run()
    assert [event for event in store.seen if event.startswith("back")] == ["back a", "back b", "back c"]
    store.succeed_all, store.waiting = done, [job("d")]
    assert turns(runner, 1) == [1]


def test_what_cannot_be_opened_fails_alone_and_the_rest_follows(make):
    store = Store(job("a"), job("b"), job("c", state=None), job("d"))
    assert turns(make(store), 4) == [1, 1, 0, 1]
    assert [event for event in store.seen if event.startswith(("fail", "commit"))] == [
        "commit a", "fail c", "commit b", "commit d",
    ]  # fmt: skip


def test_a_claim_ahead_that_fails_costs_nothing(make):
    store = Store(job("a"), job("b"), job("c"))
    claim = store.claim

    def away(*given, ahead=False, **options):
        if ahead:
            store.ready.set()
            raise StorageUnavailable("Redis does not answer")
        return claim(*given, **options)

    store.claim = away
    assert turns(make(store), 3) == [1, 1, 1]
    assert "claim c" in store.seen
