"""A planted difference is found, and none is where there is none."""

import numpy as np
import pytest
from making import noul

from d3serve.errors import InvalidRequest
from d3serve.evaluation.figures import ALL
from d3serve.evaluation.paired import compare, mcnemar, verdict


def answers(said, truths, question="q"):
    return [noul(float(p), t, f"c{i}", question) for i, (p, t) in enumerate(zip(said, truths, strict=True))]


@pytest.fixture
def truths():
    return np.random.default_rng(0).random(120) < 0.5


def said_of(truths, right, seed):
    """Probabilities of which about this share is on the side of the truth."""
    generator = np.random.default_rng(seed)
    sure = generator.uniform(0.6, 0.9, len(truths))
    return np.where((generator.random(len(truths)) < right) == truths, sure, 1 - sure)


def test_mcnemars_test_is_the_exact_one():
    assert mcnemar(0, 5) == pytest.approx(2 / 32)
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 0) == 1.0


def test_a_planted_difference_is_found_in_both_directions(truths):
    good, bad = answers(said_of(truths, 0.95, 1), truths), answers(said_of(truths, 0.6, 2), truths)
    [row] = compare(bad, good)
    assert (row.better_accuracy, row.better_log_loss) == (2, 2)
    assert row.accuracy.low > 0 > row.log_loss.high
    assert verdict(row, "old", "new").startswith("new is better")
    [turned] = compare(good, bad)
    assert verdict(turned, "new", "old").startswith("new is better")


@pytest.mark.parametrize("seed", range(5))
def test_none_is_found_where_there_is_none(truths, seed):
    one, other = (answers(said_of(truths, 0.8, 10 + 2 * seed + k), truths) for k in (0, 1))
    [row] = compare(one, other)
    assert verdict(row, "one", "other") == "cannot be told apart"
    assert row.accuracy.low <= 0 <= row.accuracy.high


def test_the_same_answers_are_no_difference(truths):
    one = answers(said_of(truths, 0.8, 1), truths)
    [row] = compare(one, one)
    assert verdict(row, "one", "other") == "no difference: both give the same answers"


def test_better_probabilities_alone_are_said_to_be_that(truths):
    sure, shy = np.where(truths, 0.95, 0.05), np.where(truths, 0.6, 0.4)
    [row] = compare(answers(shy, truths), answers(sure, truths))
    assert verdict(row, "shy", "sure").startswith("sure has the better probabilities")


def test_a_case_or_two_tell_nothing():
    for number in (1, 2):
        cases = [True] * number
        [row] = compare(answers([0.01] * number, cases), answers([0.99] * number, cases))
        assert (row.better_accuracy, row.better_log_loss) == (0, 0)


def test_many_answers_about_one_case_are_no_many_cases():
    """Of three cases, each asked forty questions, one better case is no finding."""

    def of(said):
        return [noul(p, True, f"c{case}", f"q{q}") for case, p in enumerate(said) for q in range(40)]

    [overall, *_] = compare(of([0.4, 0.4, 0.4]), of([0.9, 0.9, 0.4]))
    assert overall.name == ALL
    assert (overall.first_only, overall.second_only) == (0, 80)
    assert (overall.better_accuracy, overall.better_log_loss) == (0, 0)


def test_of_many_questions_one_that_differs_by_luck_is_no_finding():
    """p = 0.03 among twenty questions is what chance gives."""
    truths = [True] * 40
    one, other = [], []
    for q in range(20):
        flipped = [0.4] * 6 + [0.6] * 34 if q == 0 else [0.6] * 40
        one += answers(flipped, truths, f"q{q}")
        other += answers([0.6] * 40, truths, f"q{q}")
    [_, first, *_] = compare(one, other)
    assert mcnemar(0, 6) < 0.05 < first.accuracy.p


def test_cases_are_paired_by_what_they_are_and_not_by_their_order(truths):
    one = answers(said_of(truths, 0.8, 1), truths)
    [row] = compare(one, [*reversed(one)][:50])
    assert row.answers == 50
    assert row.accuracy.value == 0


def test_strangers_are_not_compared():
    with pytest.raises(InvalidRequest, match="in common"):
        compare([noul(0.5, True, "a")], [noul(0.5, True, "b")])
