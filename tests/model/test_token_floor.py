"""A text that is certainly too long is refused before it is encoded, and encoding holds nobody up."""

import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3serve.errors import MaxTokensExceeded
from d3serve.model import tokenizer as tokenizer_module
from d3serve.model.engine import DecisionEngine
from d3serve.schemas.questions import ChoiceQuestion, NoulQuestion

YES = {"q": NoulQuestion(type="noul")}
LIMIT = 1_000


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    return DecisionEngine.load(str(tiny_checkpoint), device="cpu")


@given(
    st.one_of(
        st.text(),
        st.text(alphabet=" \n\t"),
        st.text(alphabet="=-*/"),
        st.text(alphabet="e\u0301\u1100\u1161\u11a8"),
        st.integers(1, 9).map(lambda n: "the customer was charged twice " * n),
    )
)
def test_no_text_has_fewer_tokens_than_its_floor(engine, text):
    encoded = engine._format.tokenizer.encode(text)
    assert engine._format.tokenizer.floor.of(text) <= len(encoded.ids)


@pytest.mark.parametrize("unit", ["é", "word ", " ", "=", "数", "x1\n"])
def test_what_is_far_too_long_is_refused_without_being_encoded(engine, unit, monkeypatch):
    monkeypatch.setattr(tokenizer_module.PromptTokenizer, "_encode", lambda *_: pytest.fail("it was encoded"))
    text = unit * (300 * LIMIT)
    with pytest.raises(MaxTokensExceeded) as state:
        engine.prepare(text, YES, max_tokens=LIMIT)
    assert state.value.field == "state"
    long = ChoiceQuestion(type="choice", criteria={"a": text, "b": None})
    with pytest.raises(MaxTokensExceeded) as question:
        engine.prepare("s", {**YES, "long": long}, max_tokens=LIMIT)
    assert question.value.field == "questions.long"
    assert question.value.details["limit"] == LIMIT


def test_a_question_that_is_too_long_leaves_the_others_of_a_partial_job(engine):
    questions = {f"q{n}": NoulQuestion(type="noul", instructions="é" * 9_000 * (n % 2)) for n in range(40)}
    prepared = engine.prepare("s", questions, max_tokens=LIMIT, partial=True)
    assert list(prepared.by_name) == [f"q{n}" for n in range(0, 40, 2)]
    assert list(prepared.refused) == [f"q{n}" for n in range(1, 40, 2)]
    assert prepared.asked_for == 40, "the temperature is that of the client's number of questions"


def test_encoding_lets_the_thread_that_keeps_the_lease_run(engine):
    """The library's plain `encode` would hold every other thread up for as long as it takes."""
    text, done = "é" * 600_000, threading.Event()
    ticks = [time.monotonic()]

    def tick():
        while not done.wait(0.005):
            ticks.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    ticking.start()
    engine._format.tokenizer._encode(engine._format.tokenizer._plain, text)
    ended = time.monotonic()
    done.set()
    ticking.join()
    silence = max(later - earlier for earlier, later in pairwise([*ticks, ended]))
    assert silence < (ended - ticks[0]) / 2
