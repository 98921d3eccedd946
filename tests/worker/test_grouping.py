"""Passes keep their order and their budgets."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from d3serve.worker.grouping import plan_batches, question_tokens


@dataclass(frozen=True)
class Job:
    state_key: str
    state_tokens: int
    input_tokens: int
    questions: int


@dataclass(frozen=True)
class Item:
    id: int
    prepared: Job


@st.composite
def items(draw):
    states = draw(st.lists(st.integers(0, 3_000), min_size=1, max_size=5))
    chosen = draw(st.lists(st.integers(0, len(states) - 1), max_size=40))
    made = []
    for number, state in enumerate(sorted(chosen)):
        questions, tokens = draw(st.integers(1, 20)), draw(st.integers(1, 300))
        size = states[state]
        made.append(Item(number, Job(str(state), size, questions * size + tokens, questions)))
    return made


@given(items(), st.sets(st.sampled_from("01234")), st.integers(1, 4_000), st.integers(1, 40))
def test_every_job_runs_once_in_order_within_both_budgets(jobs, cached, max_tokens, max_questions):
    batches = plan_batches(jobs, frozenset(cached), max_tokens=max_tokens, max_questions=max_questions)
    assert [item for chosen in batches for item in chosen] == jobs
    known = set(cached)
    for chosen in batches:
        tokens = 0
        for item in chosen:
            tokens += question_tokens(item.prepared)
            tokens += 0 if item.prepared.state_key in known else item.prepared.state_tokens
            known.add(item.prepared.state_key)
        assert len(chosen) == 1 or tokens <= max_tokens
        assert len(chosen) == 1 or sum(item.prepared.questions for item in chosen) <= max_questions


def test_a_state_costs_its_tokens_once():
    jobs = [Item(i, Job("s", 1_000, 1_010, 1)) for i in range(10)]
    assert len(plan_batches(jobs, frozenset(), max_tokens=1_100, max_questions=99)) == 1
    assert len(plan_batches(jobs, frozenset(), max_tokens=1_099, max_questions=99)) == 2
    assert len(plan_batches(jobs, frozenset({"s"}), max_tokens=100, max_questions=99)) == 1


def test_no_jobs_make_no_pass():
    assert plan_batches([], frozenset(), max_tokens=1, max_questions=1) == []
