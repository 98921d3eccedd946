"""What each full-attention layer lets a row see, on its outputs: probabilities alone can hide a missing mask."""

import dataclasses

import pytest
import torch

from d3serve.kernels import reference
from d3serve.model import engine as engine_module
from d3serve.schemas.questions import ChoiceQuestion, NoulQuestion

STATE = "the customer was charged twice for an order and asked our team "


@pytest.fixture
def outputs(engine, monkeypatch):
    """Run one job as one pass, its tokens changed by a function; give each full-attention layer's output."""
    job = engine.prepare(STATE, {"q": NoulQuestion(type="noul", instructions="Urgent?")})
    attention, planned = reference.attention_steps, engine_module.plan_rows

    def run(change=None):
        seen = []

        def recorded(q, k, v, out, plan, **kwargs):
            yield from attention(q, k, v, out, plan, **kwargs)
            seen.append(out.clone())

        def changed(*args):
            rows = planned(*args)
            tokens = rows.tokens.copy()
            if change:
                change(tokens)
            return dataclasses.replace(rows, tokens=tokens)

        monkeypatch.setattr(reference, "attention_steps", recorded)
        monkeypatch.setattr(engine_module, "plan_rows", changed)
        engine.decide([job])
        for key in engine.cached_state_keys():
            engine.cache.forget(key)
        return seen

    return run, job.state_tokens


def swap(row):
    """Put another token into a row."""

    def change(tokens):
        tokens[row] = (tokens[row] + 1) % 256

    return change


def test_the_first_state_token_sees_the_last(outputs):
    run, state_tokens = outputs
    for before, after in zip(run(), run(swap(state_tokens - 1)), strict=True):
        assert not torch.equal(before[0], after[0])


def test_no_state_row_sees_the_question(outputs):
    run, state_tokens = outputs
    before = run()
    for row in (state_tokens, state_tokens + 5, -1):
        for ours, theirs in zip(before, run(swap(row)), strict=True):
            assert torch.equal(ours[:state_tokens], theirs[:state_tokens])


def test_the_first_question_token_sees_the_last(outputs):
    run, state_tokens = outputs
    for before, after in zip(run(), run(swap(-1)), strict=True):
        assert not torch.equal(before[state_tokens], after[state_tokens])


def test_the_properties_notice_a_causal_mask(outputs, monkeypatch):
    cut = reference.cut_attention
    monkeypatch.setattr(reference, "cut_attention", lambda s, shape: cut(s, shape._replace(causal=True)))
    with pytest.raises(AssertionError):
        test_the_first_state_token_sees_the_last(outputs)
    with pytest.raises(AssertionError):
        test_the_first_question_token_sees_the_last(outputs)


def numbered(count):
    return {
        f"q{n}": NoulQuestion(
            type="noul", instructions=f"Is the customer {'very ' * (n % 5)}angry about {n}?"
        )
        for n in range(count)
    }


def test_questions_of_one_pass_do_not_see_each_other(engine, compare):
    questions = numbered(64)
    (before,) = engine.decide([engine.prepare(STATE, questions)])
    noise = NoulQuestion(type="noul", instructions="Is the customer happy about 0?")
    same_length = questions | {"q0": noise}
    jobs = [engine.prepare(STATE, each) for each in (questions, same_length)]
    assert len(jobs[0].blocks[0]) == len(jobs[1].blocks[0])
    (cached,), (after,) = engine.decide([jobs[0]]), engine.decide([jobs[1]])
    assert after.answers["q0"] != cached.answers["q0"]
    assert {k: v for k, v in after.answers.items() if k != "q0"} == {
        k: v for k, v in cached.answers.items() if k != "q0"
    }
    longer = questions | {"q0": NoulQuestion(type="noul", instructions="noise " * 50)}
    (shifted,) = engine.decide([engine.prepare(STATE, longer)])
    for name in list(questions)[1:]:
        assert (
            compare(shifted.answers[name], [1 - before.answers[name].noul, before.answers[name].noul]) < 1e-5
        )


def test_a_question_alone_equals_itself_in_company_and_in_merged_jobs(engine, compare):
    questions = numbered(63)
    wide = ChoiceQuestion(
        type="choice", criteria={f"option {n}": "text " * (n % 8) for n in range(255)}, instructions="Which?"
    )
    asked = NoulQuestion(type="noul", instructions="Is it urgent?")
    (alone,) = engine.decide([engine.prepare(STATE, {"asked": asked})])
    expected = [1 - alone.answers["asked"].noul, alone.answers["asked"].noul]
    names = list(questions)
    for place in (0, 31, 63):  # first, in the middle, last
        around = {name: questions[name] for name in names[:place]} | {"asked": asked}
        around |= {name: questions[name] for name in names[place:]}
        (among,) = engine.decide([engine.prepare(STATE, around)])
        assert compare(among.answers["asked"], expected) < 1e-5
    jobs = [
        engine.prepare("another state", questions),
        engine.prepare(STATE, {"wide": wide, "asked": asked}),
        engine.prepare(STATE, {"asked": asked}),
    ]
    *_, merged, again = engine.decide(jobs)
    assert compare(merged.answers["asked"], expected) < 1e-5
    assert compare(again.answers["asked"], expected) < 1e-5
    assert len(merged.answers["wide"].probabilities) == 255


def test_the_same_turn_repeats_bit_by_bit(engine):
    jobs = [engine.prepare(STATE, numbered(9)), engine.prepare("x", numbered(3))]
    engine.decide(jobs)
    first = [decided.answers for decided in engine.decide(jobs)]
    assert all([d.answers for d in engine.decide(jobs)] == first for _ in range(4))


def test_readout_reads_the_last_row_of_each_question(engine, compare):
    lengths = {"a": "x " * 5, "b": "", "c": "y " * 9}
    questions = {k: NoulQuestion(type="noul", instructions=v) for k, v in lengths.items()}
    (together,) = engine.decide([engine.prepare(STATE, questions)])
    for name, question in questions.items():
        (alone,) = engine.decide([engine.prepare(STATE, {name: question})])
        value = alone.answers[name].noul
        assert compare(together.answers[name], [1 - value, value]) < 1e-5


def test_states_of_one_pass_do_not_see_each_other(engine):
    question = {"q": NoulQuestion(type="noul", instructions="Urgent?")}
    (alone,) = engine.decide([engine.prepare(STATE, question, salt="alone")])
    (_, among) = engine.decide([engine.prepare("noise " * 9, question), engine.prepare(STATE, question)])
    assert abs(alone.answers["q"].noul - among.answers["q"].noul) < 1e-5
