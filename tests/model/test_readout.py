"""Probabilities, temperatures and typed answers."""

import math

import pytest
import torch

from d3serve.model.readout import read_probabilities
from d3serve.schemas.questions import ChoiceQuestion, NoulQuestion, ScoreQuestion, confidence


def test_probabilities_are_a_softmax_over_the_questions_own_codes():
    hidden, readout = torch.eye(3)[:2] * 2, torch.arange(12.0).view(4, 3) / 10
    found = read_probabilities(hidden, readout, options=[2, 4], temperatures=[1.0, 0.5])
    for row, (options, temperature) in enumerate([(2, 1.0), (4, 0.5)]):
        expected = (readout[:options] @ hidden[row] / temperature).softmax(dim=0)
        assert found[row] == pytest.approx(expected.tolist(), abs=1e-7)
        assert math.fsum(found[row]) == pytest.approx(1.0, abs=1e-15)


def test_the_readout_is_float32_whatever_the_backbone_is():
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    readout = torch.randn(255, 64, generator=torch.Generator().manual_seed(1))
    coarse = read_probabilities(hidden.bfloat16(), readout, [255], [1.0])[0]
    expected = (readout.double() @ hidden.bfloat16().double()[0]).softmax(dim=0)
    assert coarse == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_number_of_questions_changes_no_digit():
    hidden = torch.randn(64, 2_048, generator=torch.Generator().manual_seed(0)).bfloat16()
    readout = torch.randn(255, 2_048, generator=torch.Generator().manual_seed(1)) / 45
    among = read_probabilities(hidden, readout, [255] * 64, [1.0] * 64)
    alone = [read_probabilities(row[None], readout, [255], [1.0])[0] for row in hidden]
    assert alone == among


def test_codes_that_a_question_does_not_use_take_nothing_from_it():
    """Not even where the model is sure of one of them: sharing the softmax, both options would round to zero."""
    readout = torch.tensor([[1.0], [2.0], [500.0]])
    found = read_probabilities(torch.ones(1, 1), readout, options=[2], temperatures=[1.0])
    assert found[0] == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_no_probabilities_concern_their_own_question(value):
    hidden = torch.tensor([[1.0] * 3, [value] * 3, [1.0] * 3])
    found = read_probabilities(hidden, torch.ones(4, 3), [2] * 3, [1.0] * 3)
    assert found == [[0.5, 0.5], None, [0.5, 0.5]]


@pytest.mark.parametrize("options", range(2, 256))
def test_an_even_answer_has_confidence_zero_and_a_sure_one_one(options):
    """Rounding alone takes many of them a little below zero."""
    even = read_probabilities(torch.zeros(1, 1), torch.ones(255, 1), [options], [1.0])[0]
    assert 0.0 <= confidence(even) < 1e-6
    assert confidence([1.0] + [0.0] * (options - 1)) == 1.0


def test_confidence_is_one_minus_relative_entropy():
    assert confidence([0.5, 0.5]) == 0.0
    assert confidence([1.0, 0.0, 0.0]) == 1.0
    assert confidence([1.0]) == 1.0
    assert confidence([0.9, 0.1]) == pytest.approx(1 - 0.325082973391448 / math.log(2))


def test_choice_takes_the_first_of_equals_and_keeps_the_order():
    question = ChoiceQuestion(type="choice", criteria={"z": None, "a": None, "m": None})
    answer = question.answer([0.25, 0.375, 0.375])
    assert answer.choice == "a"
    assert list(answer.probabilities) == ["z", "a", "m"]


def test_noul_is_the_probability_of_yes():
    assert NoulQuestion(type="noul").answer([0.2, 0.8]).model_dump() == {"type": "noul", "noul": 0.8}


def test_score_is_the_expected_level_with_a_legend():
    question = ScoreQuestion(type="score", criteria=["bad", {"b": 1, "a": "é"}, "good"])
    answer = question.answer([0.1, 0.3, 0.6])
    assert answer.score == pytest.approx(1.5)
    assert answer.legend == {"0": "bad", "1": '{"a":"é","b":1}', "2": "good"}
    assert answer.probabilities == {"0": 0.1, "1": 0.3, "2": 0.6}
