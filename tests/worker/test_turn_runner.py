"""What a turn does not do: work that nobody wants any more, work without a lease, work without end."""

import dataclasses
import itertools
import json
import threading
from collections import Counter

import pytest

from d3serve.errors import DeviceError, StorageUnavailable
from d3serve.settings import Settings
from d3serve.store.turns import ClaimedJob, Freed, Turn
from d3serve.worker.fake_engine import FakeEngine
from d3serve.worker.turn import MAX_ROUNDS, TurnRunner

QUESTIONS = '{"q":{"type":"noul"}}'


def job(name, questions=QUESTIONS, *, partial=False):
    """A claimed job with a state of its own."""
    return ClaimedJob(
        id=name, group=name, tenant="me", model="fake", attempt=1, state=f"={name}", questions=questions,
        partial=partial, asked_lane="", created_ms=0,
    )  # fmt: skip


class Store:
    """A job table that hands out one turn; notes what was committed and how the lease ended."""

    lease_s, max_batch_questions = 60.0, 1

    def __init__(self, *names):
        self.claimed, self.unwanted, self.joiners = [job(name) for name in names], set(), iter(())
        self.committed, self.freed, self.held = [], [], True
        self.answers, self.failures = {}, {}
        self.refused = threading.Event()
        self.passing = list  # jobs that overtake a large one between its passes
        self.taken, self.spent = set(), Counter()

    def claim(self, _pid, *, beside="", **_):
        return Turn("beside", self.passing()) if beside else Turn("lease", self.claimed)

    def progress(self, _lease, _stage, names):
        return set(names) - self.unwanted

    def renew(self, _lease):
        if not self.held:
            self.refused.set()
        return self.held

    def succeed_all(self, _lease, successes, _identity):
        self.committed += [each.job_id for each in successes]
        self.answers |= {each.job_id: each.response for each in successes}
        return [0 if each.job_id in self.taken else 1300 for each in successes]

    def fail(self, _lease, name, error):
        self.failures[name] = error
        return 1700

    def more(self, _lease):
        return list(itertools.islice(self.joiners, 1))

    def free(self, lease, mode, _warm, spent):
        self.spent.update(spent)
        self.freed.append(mode if lease == "lease" else f"{lease} {mode}")
        return Freed(0, 0, [])


class Engine(FakeEngine):
    """Runs `before` ahead of each pass."""

    before = staticmethod(lambda: None)

    def _pass(self, in_pass, asked, tell):
        self.before()
        super()._pass(in_pass, asked, tell)


def asked(count, **instructions):
    """So many questions; some with instructions of their own."""
    return json.dumps(
        {f"q{n}": {"type": "noul", "instructions": instructions.get(f"q{n}")} for n in range(count)}
    )


def run(store, before=lambda: None, **changes):
    return runner(store, before, **changes).run()


def runner(store, before=lambda: None, **changes):
    for constant in ("max_batch_questions", "lease_s"):
        setattr(store, constant, changes.pop(constant, getattr(store, constant)))
    settings = Settings().model_copy(update=changes)
    engine = Engine.load("fake:?faults=1", pass_questions=store.max_batch_questions)
    engine.before = before
    return TurnRunner(store, engine, settings, lambda _lane: None)


def test_a_job_that_is_unwanted_by_the_time_of_its_pass_is_not_decided():
    store = Store("a", "b", "c")
    run(store, lambda: store.unwanted.add("b"))
    assert (store.committed, store.freed) == (["a", "c"], ["back"])


def test_jobs_are_committed_as_their_passes_end():
    store, seen = Store("a", "b", "c"), []
    run(store, lambda: seen.append(list(store.committed)))
    assert seen == [[], ["a"], ["a", "b"]]


def test_a_job_that_breaks_its_pass_fails_alone_and_its_neighbours_share_passes():
    store, passes = Store("a", "b", "c", "d"), []
    store.claimed[1] = dataclasses.replace(job("b"), state="=fake:crash")
    run(store, lambda: passes.append(1), max_batch_questions=100)
    assert (store.committed, list(store.failures)) == (["a", "c", "d"], ["b"])
    assert len(passes) == 5, "all, the first half, each of it alone, the second half"


def test_the_jobs_of_a_pass_are_committed_in_one_round_trip():
    store, trips = Store("a", "b", "c"), []
    ends = store.succeed_all
    store.succeed_all = lambda *given: trips.append(1) or ends(*given)
    run(store, max_batch_questions=100)
    assert (store.committed, len(trips)) == (["a", "b", "c"], 1)


def test_the_end_of_a_turn_tells_where_the_time_of_those_went_that_it_ended():
    store = Store("a", "b", "c")
    store.claimed = [dataclasses.replace(each, lane="offline", waited_ms=7) for each in store.claimed]
    store.claimed[1] = dataclasses.replace(store.claimed[1], state="=fake:crash")
    store.taken = {"c"}
    run(store)
    assert store.committed == ["a", "c"]
    often, sums = Counter(), {}
    for name, count in store.spent.items():
        what, lane, bound = name.split(":")
        assert lane == "offline"
        if bound == "us":
            sums[what] = count
        else:
            often[what] += count
    assert often == {"queue": 2, "tokenize": 1, "pass": 1, "total": 2}
    assert (sums["queue"], sums["total"]) == (14_000, 3_000_000)


def test_the_jobs_of_a_turn_are_tokenized_side_by_side():
    store, both = Store("a", "b", "c"), threading.Barrier(2)
    turns = runner(store, max_batch_questions=100)
    prepare = turns._engine.prepare

    def meet(state, *given, **options):
        if state != "c":
            both.wait(20)  # for the other, which would never come one after another
        if state == "b":
            raise RuntimeError("no fault of the others")
        return prepare(state, *given, **options)

    turns._engine.prepare = meet
    turns.run()
    assert (store.committed, list(store.failures)) == (["a", "c"], ["b"])


def test_a_turn_stops_at_the_next_pass_once_its_lease_is_lost():
    store = Store("a", "b", "c")

    def lose():
        store.held = False
        assert store.refused.wait(60)
        for keeper in (one for one in threading.enumerate() if one.name == "d3serve-lease"):
            keeper.join(60)  # it leaves once it has taken note

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


def test_what_redis_could_not_take_goes_back_unharmed():
    store = Store("a", "b")

    def away(*_):
        raise StorageUnavailable("Redis does not answer")

    store.succeed_all = away
    with pytest.raises(StorageUnavailable):
        run(store)
    assert store.freed == ["back"]


def test_after_a_turn_that_redis_broke_off_large_jobs_let_others_pass_as_before():
    store, outage = Store(), iter([StorageUnavailable("Redis does not answer"), None])
    store.claimed = [job("large", asked(2))]
    store.passing = lambda: [job("small")]

    def progress(lease, _stage, names):
        if lease == "beside" and (error := next(outage)):
            raise error
        return set(names)

    store.progress = progress
    turns = runner(store)
    with pytest.raises(StorageUnavailable):
        turns.run()
    turns.run()
    assert store.committed == ["small", "large"]
    assert store.freed == ["beside back", "back", "beside back", "back"]


def test_between_the_batches_of_a_large_job_others_have_their_turn():
    store = Store()
    store.claimed = [job("large", asked(6))]
    arriving = iter([[job("early")], [], [job("late")], [], []])
    store.passing = lambda: next(arriving)
    run(store, max_batch_questions=1)
    assert store.committed == ["early", "late", "large"]
    assert list(store.answers["large"].answers) == [f"q{n}" for n in range(6)]
    assert store.answers["large"].usage.questions == 6
    assert store.freed == ["beside back", "beside back", "back"]
    assert not list(arriving), "after every batch but the last"


def test_a_job_in_batches_costs_and_answers_what_it_does_in_one():
    whole, cut = Store(), Store()
    for store, limit in ((whole, 100), (cut, 2)):
        store.claimed = [job("large", asked(5))]
        run(store, max_batch_questions=limit)
    assert cut.answers == whole.answers


def test_a_large_job_that_is_canceled_stops_at_its_next_batch():
    store, passes = Store(), []
    store.claimed = [job("large", asked(5))]

    def cancel():
        passes.append(1)
        store.unwanted.add("large")

    run(store, cancel, max_batch_questions=1)
    assert (len(passes), store.committed) == (1, [])


def test_a_device_that_dies_beside_a_large_job_is_not_held_against_it():
    store, engine = Store(), iter([None, DeviceError("an illegal memory access")])
    store.claimed = [job("large", asked(3))]
    store.passing = lambda: [job("deadly")]

    def die():
        if error := next(engine):
            raise error

    with pytest.raises(DeviceError):
        run(store, die)
    assert store.freed == ["beside lost", "lost"], "the store knows that the large one waited"


def test_no_numbers_for_one_question_of_a_partial_job_are_that_question_s_error():
    store = Store()
    store.claimed = [job("partial", asked(3, q1="fake:nan"), partial=True), job("all", asked(3, q1="fake:nan")),
                     job("none", asked(1, q0="fake:nan"), partial=True), job("good", asked(1))]  # fmt: skip
    run(store, max_batch_questions=100)
    answers = store.answers["partial"].answers
    assert [answers[f"q{n}"].type for n in range(3)] == ["noul", "error", "noul"]
    assert answers["q1"].error.code == "invalid_model_output"
    assert {name: error.field for name, error in store.failures.items()} == {
        "all": "questions.q1",
        "none": "questions.q0",
    }
    assert store.committed == ["partial", "good"]


def test_the_tokens_of_a_whole_job_are_bounded_by_its_lane():
    large = asked(40)
    for lane, limits in (
        ("interactive", {"max_job_tokens_interactive": 200}),
        ("", {"max_job_tokens_offline": 200}),
    ):
        store = Store("small")
        store.claimed.append(dataclasses.replace(job("large", large), asked_lane=lane))
        run(store, max_batch_questions=100, **limits)
        assert store.committed == ["small"]
        assert (store.failures["large"].code, store.failures["large"].field) == (
            "max_tokens_exceeded",
            "questions",
        )
        assert "200 are allowed" in store.failures["large"].message
