"""The fake engine keeps the engine's promises: answers do not depend on company, usage tells what was read."""

import pytest

from d3serve.errors import InvalidCheckpoint, MaxTokensExceeded
from d3serve.schemas.questions import ChoiceQuestion, NoulQuestion, ScoreQuestion
from d3serve.worker.fake_engine import FakeEngine

QUESTIONS = {
    "c": ChoiceQuestion(type="choice", criteria={"a": "A", "b": None, "c": "C"}),
    "n": NoulQuestion(type="noul"),
    "s": ScoreQuestion(type="score", criteria=["bad", "fair", "good"]),
}


def test_a_question_alone_gets_the_answer_it_gets_in_company():
    engine = FakeEngine.load("fake:")
    [together] = engine.decide([engine.prepare("s", QUESTIONS)])
    for name, question in QUESTIONS.items():
        [alone] = engine.decide([engine.prepare("s", {name: question})])
        assert alone.answers[name] == together.answers[name]
    assert sum(together.answers["c"].probabilities.values()) == pytest.approx(1)


def test_usage_tells_who_paid_for_the_state():
    engine = FakeEngine.load("fake:?cache=1")
    one, two = engine.decide([engine.prepare("s" * 400, QUESTIONS) for _ in range(2)])
    assert (one.usage.state_cached, two.usage.state_cached) == (False, True)
    assert one.usage.computed_tokens == two.usage.computed_tokens + one.usage.state_tokens
    [again] = engine.decide([engine.prepare("s" * 400, QUESTIONS)])
    assert again.usage.state_cached
    engine.decide([engine.prepare("t", QUESTIONS)])
    [evicted] = engine.decide([engine.prepare("s" * 400, QUESTIONS)])
    assert not evicted.usage.state_cached


def test_tenants_share_no_state():
    engine = FakeEngine.load("fake:")
    keys = {engine.prepare("s", QUESTIONS, salt=salt).state_key for salt in ("me", "you")}
    assert len(keys) == 2


def test_too_long_names_the_question():
    engine = FakeEngine.load("fake:?max_length=20")
    with pytest.raises(MaxTokensExceeded) as error:
        engine.prepare("s" * 400, QUESTIONS)
    assert error.value.field == "questions.c"


@pytest.mark.parametrize("model", ["fake:?speed=1", "fake:?load_error=checkpoint"])
def test_what_it_cannot_load_it_refuses(model):
    with pytest.raises(InvalidCheckpoint):
        FakeEngine.load(model)
