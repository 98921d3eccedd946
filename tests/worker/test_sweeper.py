"""A round of the main process's watch: whose lease it frees, and what it does not let stop it."""

import pytest

from d3serve.errors import StorageUnavailable
from d3serve.settings import Settings
from d3serve.store.turns import Freed, Reaped
from d3serve.worker.sweeper import Sweeper

NOTHING = Reaped(0, 0, [])


class Store:
    """A job table whose answers a test sets; remembers what was freed, and how."""

    def __init__(self):
        self.leases, self.freed, self.said, self.rounds = {}, [], {}, 0
        self.on_leases = lambda: None

    def own_leases(self):
        self.on_leases()
        return dict(self.leases)

    def free(self, lease, mode):
        self.freed.append((lease, mode))
        self.leases.pop(lease)
        return Freed(1, 0, ["interactive"])

    def reap(self):
        self.rounds += 1
        return NOTHING

    def publish(self, fields):
        self.said |= fields

    def published(self, *fields):
        return [self.said.get(name) for name in fields]

    def retire(self):
        self.said.clear()


class Case:
    """A sweeper beside a store, and the child processes that it believes to live."""

    def __init__(self):
        self.store, self.living, self.stopping, self.woken = Store(), {7}, False, []
        self.sweeper = Sweeper(
            self.store, Settings(), self.woken.append,
            child_pids=lambda: set(self.living), stopping=lambda: self.stopping,
        )  # fmt: skip


@pytest.fixture
def case():
    return Case()


@pytest.mark.parametrize(("stopping", "mode"), [(False, "lost"), (True, "back")])
def test_the_lease_of_a_dead_child_is_freed_at_once(case, stopping, mode):
    case.store.leases = {"dead": 6, "alive": 7}
    case.stopping = stopping
    case.sweeper.sweep()
    assert case.store.freed == [("dead", mode)]
    assert case.woken == ["interactive"]


def test_a_child_that_starts_and_claims_in_mid_round_keeps_its_lease(case):
    """The look at the leases may last as long as Redis is away; a child may be replaced meanwhile."""

    def replaced():
        case.living = {8}
        case.store.leases = {"fresh": 8}

    case.store.on_leases = replaced
    case.sweeper.sweep()
    assert case.store.freed == []


def test_a_round_that_fails_is_not_the_last(case, monkeypatch):
    monkeypatch.setattr("d3serve.worker.sweeper.EVERY_S", 0.01)
    fails = iter([StorageUnavailable("away"), RuntimeError("a bug")])

    def fail():
        for error in fails:
            raise error
        case.sweeper._halt.set()

    case.store.on_leases = fail
    case.sweeper.start()
    case.sweeper.join(60)  # formatting what failed may take a loaded machine seconds
    assert case.store.rounds == 1
    case.store.on_leases = lambda: None
    case.sweeper.finish(case.store)


def test_what_is_still_leased_at_the_end_is_given_back_unharmed(case):
    case.store.leases = {"one": 7}
    case.sweeper.start()
    case.sweeper.finish(case.store)
    assert case.store.freed == [("one", "back")]
    assert case.store.said == {}
