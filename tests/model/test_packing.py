"""What goes into a pass, and what becomes of the jobs of one that fails; no engine needed."""

from itertools import groupby, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3serve.errors import DeviceError, OutOfDeviceMemory
from d3serve.model.deciding import NOBODY, Watch, decide_by_passes
from d3serve.model.engine import DecisionEngine
from d3serve.model.packing import Bounds, Cost, Packer, jobs_of
from d3serve.schemas.questions import NoulQuestion

ANY = 10**9


class Job:
    """Questions of so many tokens about a state."""

    def __init__(self, state_key, state_tokens, questions):
        self.state_key, self.state_tokens, self.questions = state_key, state_tokens, questions

    def costs(self):
        return [Cost(tokens, self.state_key, self.state_tokens) for tokens in self.questions]


def packer(jobs, cached=(), *, tokens=ANY, questions=ANY, rows=ANY, states=ANY):
    return Packer(jobs, Bounds(rows, states, tokens, questions), set(cached).__contains__)


def passes(packer):
    """Each pass's questions, as (job, question)."""
    while choice := packer.choose():
        packer.succeeded(choice.asked)
        yield [(each.job, each.question) for each in choice.asked]


@st.composite
def drawn_jobs(draw):
    sizes = draw(st.lists(st.integers(0, 3_000), min_size=1, max_size=5))
    chosen = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=30))
    counts = st.lists(st.integers(1, 300), min_size=1, max_size=12)
    return [Job(str(state), sizes[state], draw(counts)) for state in chosen]


@given(drawn_jobs(), st.sets(st.sampled_from("01234")), st.integers(1, 4_000), st.integers(1, 40))
def test_every_question_is_asked_once_within_the_budgets(jobs, cached, tokens, questions):
    known, left = set(cached), {number: len(job.questions) for number, job in enumerate(jobs)}
    packed, found = packer(jobs, cached, tokens=tokens, questions=questions), []
    while choice := packed.choose():
        asked, whole = (
            choice.asked,
            [number for number in choice.jobs if left[number] == len(jobs[number].questions)],
        )
        new = {
            each.cost.state_key: each.cost.state_tokens for each in asked if each.cost.state_key not in known
        }
        rows = sum(new.values()) + sum(each.cost.tokens for each in asked)
        unavoidable = asked[0].cost.tokens + new.get(asked[0].cost.state_key, 0)
        assert len(asked) <= max(1, questions)
        assert rows <= tokens or len(choice.jobs) == 1, "only one job's pass may exceed the budget"
        assert rows <= max(tokens, unavoidable) or unavoidable - asked[0].cost.tokens > tokens
        for number in choice.jobs:
            left[number] -= sum(each.job == number for each in asked)
        cut = [number for number in choice.jobs if left[number]]
        assert not cut or (len(choice.jobs) == 1 and (cut == whole or not whole)), (
            "a job that fits a pass is whole"
        )
        known |= new.keys()
        packed.succeeded(asked)
        found += [(each.job, each.question) for each in asked]
    assert sorted(found) == sorted((n, q) for n, job in enumerate(jobs) for q in range(len(job.questions)))
    order = [jobs[number].state_key for number, _ in groupby(found, lambda each: each[0])]
    assert len([key for key, _ in groupby(order)]) == len(set(order)), "the jobs of one state stand together"


def test_a_state_costs_its_tokens_once_and_nothing_where_it_is_cached():
    jobs = [Job("s", 1_000, [10]) for _ in range(10)]
    assert len(list(passes(packer(jobs, tokens=1_100)))) == 1
    assert len(list(passes(packer(jobs, tokens=1_099)))) == 2
    assert len(list(passes(packer(jobs, ["s"], tokens=100)))) == 1


def test_a_state_that_alone_exceeds_the_budget_leaves_its_questions_as_much_again():
    job = Job("s", 5_000, [100] * 25)
    assert [len(each) for each in passes(packer([job, Job("t", 1, [1])], tokens=1_000))] == [10, 10, 5, 1]
    assert len(packer([job], tokens=1_000, rows=5_500).choose().asked) == 5, "as the device allows"


def test_a_pass_pins_no_more_states_than_it_may():
    jobs = [Job(str(number), 10, [1]) for number in range(7)]
    assert [len(each) for each in passes(packer(jobs, states=3))] == [3, 3, 1]


def test_what_the_pools_did_not_hold_comes_first_in_the_next_pass():
    packed = packer([Job("s", 1, [1] * 4), Job("t", 1, [1])])
    asked = packed.choose().asked
    packed.succeeded(asked[:3])
    packed.give_back(asked[3:])
    assert list(passes(packed)) == [[(0, 3), (1, 0)]]


def test_no_jobs_make_no_pass():
    assert packer([]).choose() is None


def run(jobs, run_pass, watch=NOBODY, **bounds):
    """Decide; what became of each job, and the jobs of each pass."""
    tried, ends = [], {}

    def record(asked, tell):
        tried.append(jobs_of(asked))
        return run_pass(asked, tell)

    for ended in decide_by_passes(packer(jobs, **bounds), record, lambda job: f"answer {job}", watch):
        ends |= {decision.job: decision.found for decision in ended}
    return ends, tried


def test_a_job_that_breaks_its_pass_is_found_by_halves_and_fails_alone():
    broken = RuntimeError("broken")

    def run_pass(asked, _tell):
        return len(asked), broken if 5 in jobs_of(asked) else None

    ends, tried = run([Job(str(n), 1, [1, 1]) for n in range(8)], run_pass)
    assert ends == {n: broken if n == 5 else f"answer {n}" for n in range(8)}
    assert tried == [[*range(8)], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [4], [5], [6, 7]]


def test_where_memory_runs_out_no_pass_asks_more_than_half_as_many_from_then_on():
    asked_for = []

    def run_pass(asked, _tell):
        asked_for.append(len(asked))
        return len(asked), OutOfDeviceMemory("full") if len(asked) > 3 else None

    ends, _ = run([Job("s", 1, [1] * 10), Job("t", 1, [1, 1])], run_pass)
    assert asked_for == [12, 6, 3, 3, 3, 3]
    assert ends == {0: "answer 0", 1: "answer 1"}


def test_what_does_not_fit_even_alone_fails_and_its_neighbours_do_not():
    full = OutOfDeviceMemory("full")

    def run_pass(asked, _tell):
        return (
            (0, full)
            if asked[0].job == 1
            else (len(list(takewhile(lambda each: each.job != 1, asked))), None)
        )

    ends, tried = run([Job(str(n), 1, [1, 1]) for n in range(3)], run_pass)
    assert ends == {0: "answer 0", 1: full, 2: "answer 2"}
    assert len(tried) == 3


def test_a_dead_device_ends_everything():
    def run_pass(_asked, _tell):
        raise DeviceError("gone")

    with pytest.raises(DeviceError):
        run([Job("s", 1, [1])] * 2, run_pass)


class Choosy(Watch):
    """Wants some jobs, gives up those of others between two steps; notes what it is told."""

    def __init__(self, unwanted=(), given_up=()):
        self.unwanted, self.given_up = set(unwanted), set(given_up)
        self.told, self.jobs, self.halved = [], [], []

    def starts(self, jobs, done, part):
        self.jobs = [job for job in jobs if job not in self.unwanted]
        self.told.append((done, part))
        return self.jobs

    def goes_on(self, _share):
        return self.given_up.isdisjoint(self.jobs)

    def tries_again(self, jobs, error):
        self.halved.append((jobs, str(error)))


def in_two_steps(asked, tell):
    try:
        tell(0.5)
        tell(1)
    except Exception as error:
        return len(asked), error
    return len(asked), None


def test_of_what_is_unwanted_or_given_up_nothing_more_is_asked_and_the_rest_is():
    jobs = [Job(str(n), 1, [1, 1]) for n in range(6)]
    ends, tried = run(jobs, in_two_steps, Choosy(unwanted=[0, 3], given_up=[2]), questions=4)
    assert tried == [[1], [2], [4, 5]]
    assert set(ends) == {1, 4, 5}
    ends, _ = run([Job("s", 1, [1] * 6)], in_two_steps, Choosy(unwanted=[0]), questions=2)
    assert ends == {}


def test_the_share_done_of_a_job_in_several_passes_grows_to_one_and_counts_its_state_once():
    watch = Choosy()
    run([Job("s", 60, [10] * 4)], in_two_steps, watch, tokens=80)
    assert watch.told == [pytest.approx(told) for told in ((0, 0.8), (0.8, 0.2))]


def test_what_a_watch_raises_ends_everything_and_is_nobodys_fault():
    class Away(Watch):
        def goes_on(self, done):
            raise ConnectionError(done)

    with pytest.raises(ConnectionError):
        run([Job("s", 1, [1]), Job("t", 1, [1])], in_two_steps, Away())


@pytest.mark.parametrize("error", [None, ValueError("bad"), OutOfDeviceMemory("full")])
def test_a_watch_hears_of_the_end_of_each_pass_whatever_came_of_it(error):
    class Listening(Watch):
        def __init__(self):
            self.ended = []

        def ends(self, jobs):
            self.ended.append(jobs)

    watch = Listening()
    _, tried = run([Job("s", 1, [1]), Job("t", 1, [1])], lambda asked, _: (len(asked), error), watch)
    assert watch.ended == tried


def test_a_watch_hears_of_the_end_of_a_pass_that_it_ended_itself():
    class Leaving(Watch):
        ended = ()

        def goes_on(self, _share):
            raise ConnectionError

        def ends(self, jobs):
            self.ended = jobs

    watch = Leaving()
    with pytest.raises(ConnectionError):
        run([Job("s", 1, [1])], in_two_steps, watch)
    assert watch.ended == [0]


def test_a_watch_hears_of_a_pass_that_is_tried_again():
    watch = Choosy()
    run([Job("s", 1, [1]), Job("t", 1, [1])], lambda asked, _: (len(asked), ValueError("bad")), watch)
    assert watch.halved == [([0, 1], "bad")]


def test_jobs_are_decided_as_their_passes_end_with_the_answers_of_one_pass(tiny_checkpoint):
    asked = {f"q{n}": NoulQuestion(type="noul", instructions=f"Is it {n} days late?") for n in range(5)}
    engine = DecisionEngine.load(str(tiny_checkpoint), device="cpu", pass_questions=3)
    jobs = [
        engine.prepare(state, asked if state == "large" else {"q0": asked["q0"]})
        for state in ("a", "large", "b")
    ]
    ended = list(engine.decisions(jobs))
    assert [[each.job for each in some] for some in ended] == [[0], [1, 2]], "the last question shares a pass"
    whole = DecisionEngine.load(str(tiny_checkpoint), device="cpu").decide(jobs)
    for decided, expected in zip((each.found for some in ended for each in some), whole, strict=True):
        assert decided.usage == expected.usage
        for name, answer in expected.answers.items():
            assert decided.answers[name].noul == pytest.approx(answer.noul, abs=1e-5)
