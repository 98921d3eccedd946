"""Thresholds for what is wanted, against a search of all of them."""

import numpy as np
import pytest
from making import nouls

from d3serve.errors import InvalidRequest
from d3serve.evaluation.yes_no import Wanted, read_cost, sweep, thresholds

SAID = [0.1, 0.2, 0.4, 0.6, 0.6, 0.8, 0.9]
TRUTHS = [False, False, True, False, True, True, True]


def chosen(said, truths, **wanted):
    return {each.wanted.split()[0]: each for each in thresholds(nouls(said, truths), Wanted(**wanted))}


def test_the_thresholds_of_seven_cases_worked_out_by_hand():
    found = chosen(SAID, TRUTHS, precision=1.0, recall=1.0)
    assert found["precision"].at == 0.8
    assert found["precision"].recall.value == 0.5
    assert found["recall"].at == 0.4
    assert found["recall"].precision.value == 0.8
    assert (found["recall"].wrong_yes, found["recall"].missed_yes) == (1, 0)
    assert (found["as"].wrong_yes, found["as"].missed_yes) == (1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_is_better(seed):
    generator = np.random.default_rng(seed)
    said = generator.random(60).round(1)  # many are equal
    truths = generator.random(60) < said
    found = chosen(said, truths, precision=0.7, recall=0.8, wrong_yes=3, missed_yes=2)
    every = []
    for at in np.unique(said):
        right, yes = (truths & (said >= at)).sum(), (said >= at).sum()
        every.append((right / yes, right / truths.sum(), 3 * (yes - right) + 2 * (truths.sum() - right)))
    assert found["precision"].recall.value == max(r for p, r, _ in every if p >= 0.7)
    assert found["recall"].precision.value == max(p for p, r, _ in every if r >= 0.8)
    assert found["least"].cost == min(c for *_, c in every)


def test_a_precision_that_none_reaches_is_said_to_be_so():
    found = chosen([0.9, 0.1], [False, True], precision=0.9)
    assert found["precision"].at is None
    assert found["recall"].at == 0.1


def test_where_every_yes_costs_more_than_it_brings_it_is_never_yes():
    assert chosen([0.9, 0.8, 0.1], [False, True, False], wrong_yes=100)["least"].at is None


@pytest.mark.parametrize("truth", [True, False])
def test_with_one_class_alone_there_is_nothing_to_choose(truth):
    judged = nouls([0.2, 0.9], [truth, truth])
    assert sweep(judged) is None
    assert thresholds(judged, Wanted()) == []


@pytest.mark.parametrize("text", ["5", "a:b", "-1:2", "0:0", "1:2:3", "nan:1", "inf:1"])
def test_a_cost_that_is_none_is_refused(text):
    with pytest.raises(InvalidRequest, match="--cost"):
        read_cost(text)
    assert read_cost("5:1") == (5.0, 1.0)
