"""Frames of both libraries: answers as columns, in their rows, asked once and kept."""

import json
import sys

import pandas as pd
import polars as pl
import pytest

from d3serve.client import Choice, Client, Score, YesNo, ask_frame
from d3serve.errors import D3ServeError, InvalidRequest

QUESTIONS = {
    "spam": YesNo("Is it spam?"),
    "team": Choice("Which team?", ["a", "b"]),
    "haste": Score("How urgent?", ["low", "high"]),
}


@pytest.fixture(params=[pd.DataFrame, pl.DataFrame], ids=["pandas", "polars"])
def frame(request):
    return request.param({"text": ["one", "two", "one"], "n": [1, 2, 3]})


@pytest.fixture
def client(service, worker):
    worker.show_itself(revision=None)
    with Client(service) as made:
        yield made


def jobs_made(worker):
    return worker.turns._table.client.zcard(worker.turns._key("jobs", "public"))


def column(frame, name):
    return frame[name].to_list()


def test_answers_become_columns_of_the_same_kind_of_frame(frame, client, take_turns, worker):
    with take_turns():
        found = ask_frame(frame, "text", QUESTIONS, client=client)
    assert type(found) is type(frame)
    assert column(found, "n") == [1, 2, 3]
    assert column(found, "spam") == [True] * 3
    assert column(found, "spam_probability") == [0.75] * 3
    assert column(found, "team") == ["b"] * 3
    assert column(found, "haste") == [1.5] * 3
    assert column(found, "haste_level") == ["high"] * 3
    assert jobs_made(worker) == 2  # rows that are alike are asked once
    assert "spam" not in frame.columns


def test_columns_together_are_an_object(frame, client, take_turns, worker):
    with take_turns():
        ask_frame(frame, ["text", "n"], QUESTIONS, client=client)
    assert jobs_made(worker) == 3


def test_rows_of_pandas_keep_their_own_index(client, take_turns):
    frame = pd.DataFrame({"text": ["a", "b"]}, index=[7, 3])
    with take_turns():
        found = ask_frame(frame, "text", QUESTIONS, client=client)
    assert list(found.index) == [7, 3]
    assert found["team"].tolist() == ["b", "b"]


def test_what_was_kept_is_not_asked_again(frame, client, take_turns, worker, tmp_path):
    kept = tmp_path / "kept.jsonl"
    with take_turns():
        first = ask_frame(frame[:1], "text", QUESTIONS, client=client, keep=kept)
        assert jobs_made(worker) == 1
        kept.write_text(kept.read_text() + '{"asked": "cut o')  # as a crash leaves it
        done = []
        found = ask_frame(frame, "text", QUESTIONS, client=client, keep=kept, progress=done.append)
        assert done == [1]
        assert jobs_made(worker) == 2
        ask_frame(frame, "text", QUESTIONS | {"spam": YesNo("Junk?")}, client=client, keep=kept)
    assert jobs_made(worker) == 4  # another wording is another question
    assert column(first, "spam")[0] == column(found, "spam")[0]
    assert len([json.loads(line) for line in kept.read_text().splitlines()]) == 4


def test_what_other_weights_answered_is_asked_anew(frame, client, take_turns, worker, tmp_path):
    with take_turns():
        ask_frame(frame, "text", QUESTIONS, client=client, keep=tmp_path / "kept.jsonl")
        worker.show_itself(revision=None, identity="trained again")
        while client.models()[0]["identity"] != "trained again":  # the API remembers them for a second
            pass
        ask_frame(frame, "text", QUESTIONS, client=client, keep=tmp_path / "kept.jsonl")
    assert jobs_made(worker) == 4


def test_a_row_without_answers_ends_it_or_is_told(frame, client, take_turns, worker):
    wrong = {"spam": YesNo("x" * 10), "team": Choice("Which?", ["a"])}  # one option is no choice
    with take_turns():
        with pytest.raises(D3ServeError):
            ask_frame(frame, "text", wrong, client=client)
        found = ask_frame(frame, "text", wrong, client=client, return_exceptions=True)
    assert all(told.startswith("invalid_") or "too" in told for told in column(found, "error"))
    assert jobs_made(worker) == 0


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ({"text": ["a"]}, {"state": "body"}, 'no column "body"'),
        ({"text": ["a", None]}, {"state": "text"}, "row 1 of column"),
        ({"text": ["a"], "team": [1]}, {"state": "text"}, 'a column "team" already'),
        ({"text": ["a"]}, {"state": "text", "keep": "/"}, "cannot use /"),
    ],
)
@pytest.mark.parametrize("library", [pd, pl])
def test_a_frame_that_cannot_be_asked_is_refused(client, library, values, options, words):
    with pytest.raises(InvalidRequest, match=words):
        ask_frame(library.DataFrame(values), questions=QUESTIONS, client=client, **options)


def test_a_file_of_something_else_is_left_alone(frame, client, tmp_path):
    other = tmp_path / "notes.jsonl"
    other.write_text('{"mine": 1}\n')
    with pytest.raises(InvalidRequest, match="line 1"):
        ask_frame(frame, "text", QUESTIONS, client=client, keep=other)
    assert other.read_text() == '{"mine": 1}\n'


def test_without_the_extra_it_is_named(frame, client, monkeypatch):
    monkeypatch.setitem(sys.modules, "narwhals", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'd3serve\[eval\]'"):
        ask_frame(frame, "text", QUESTIONS, client=client)
