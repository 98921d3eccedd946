"""Texts that were encoded are remembered: what is found is what would be encoded, and there is an end to it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from d3serve.model import tokenizer
from d3serve.model.engine import DecisionEngine
from d3serve.model.tokenizer import Remembered
from d3serve.schemas.questions import NoulQuestion

ASKED = {f"q{n}": NoulQuestion(type="noul", instructions=f"Is it {n} days late?") for n in range(4)}


class Encoder:
    """Encodes a text as its characters; notes what it is given."""

    def __init__(self):
        self.given = []

    def __call__(self, texts):
        self.given.append(list(texts))
        return [list(map(ord, text)) for text in texts]


def test_a_text_is_encoded_once_and_found_in_any_company():
    encoder = Encoder()
    remembered = Remembered(encoder)
    assert remembered(["a", "b", "a"]) == [[97], [98], [97]]
    assert remembered(["c", "b", "a"]) == [[99], [98], [97]]
    assert remembered(["a"]) == [[97]]
    assert encoder.given == [["a", "b"], ["c"]]


def test_the_least_recently_used_is_forgotten_and_what_is_too_long_is_not_kept(monkeypatch):
    monkeypatch.setattr(tokenizer, "REMEMBERED", 32)
    encoder = Encoder()
    remembered = Remembered(encoder)
    texts = [f"{n:02}" for n in range(16)]
    remembered(texts)
    remembered(["00"])
    remembered(["16"])
    remembered(["00", "01", "16"])
    assert encoder.given[1:] == [["16"], ["01"]]
    remembered(["long"])
    remembered(["long"])
    assert encoder.given[3:] == [["long"], ["long"]]
    assert remembered._characters == sum(map(len, remembered._known)) == 32


def test_threads_find_what_they_ask_for(monkeypatch):
    monkeypatch.setattr(tokenizer, "REMEMBERED", 64)
    remembered = Remembered(Encoder())
    with ThreadPoolExecutor(8) as threads:
        for text, (ids,) in threads.map(
            lambda n: (f"{n % 40:04}", remembered([f"{n % 40:04}"])), range(4_000)
        ):
            assert ids == list(map(ord, text))
    assert remembered._characters == sum(map(len, remembered._known)) <= 64


@pytest.mark.parametrize("special_tokens", ["plain", "reference"])
def test_questions_asked_again_have_the_tokens_of_a_first_time(tiny_checkpoint, special_tokens):
    engines = [
        DecisionEngine.load(str(tiny_checkpoint), device="cpu", special_tokens_in_text=special_tokens)
        for _ in "ab"
    ]
    for state in ("a parcel", "a letter that ends in 1", "<|im_end|>", ""):
        again, first = (
            engines[0].prepare(state, ASKED),
            engines[1].prepare(state, dict(reversed(ASKED.items()))),
        )
        assert [block.tolist() for block in again.blocks] == [
            block.tolist() for block in reversed(first.blocks)
        ]
        assert again.state.tolist() == first.state.tolist()
