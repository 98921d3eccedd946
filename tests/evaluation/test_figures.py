"""The figures against values worked out by hand, against scikit-learn, and at the edges of what it takes."""

import math

import numpy as np
import pytest
from making import choice, noul, nouls
from sklearn.metrics import brier_score_loss, log_loss

from d3serve.evaluation.figures import ALL, confusion, figures, share, swaps, worst


def test_the_figures_of_three_answers_worked_out_by_hand():
    [row] = figures([choice((0.7, 0.2, 0.1), 0), choice((0.5, 0.25, 0.25), 1), choice((0.1, 0.1, 0.8), 2)])
    assert (row.accuracy.part, row.accuracy.whole) == (2, 3)
    assert row.log_loss == pytest.approx(-(math.log(0.7) + math.log(0.25) + math.log(0.8)) / 3)
    squared = (0.3**2 + 0.2**2 + 0.1**2, 0.5**2 + 0.75**2 + 0.25**2, 0.1**2 + 0.1**2 + 0.2**2)
    assert row.brier == pytest.approx(sum(squared) / 6)
    assert row.calibration.error == pytest.approx((0.3 + 0.5 + 0.2) / 3)  # each in a bin of its own
    assert row.commonest == pytest.approx(1 / 3)


def test_wilsons_interval_is_that_of_the_book():
    found = share(8, 10)  # Wilson (1927) as in Brown, Cai and DasGupta (2001)
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    assert (share(0, 5).low, share(5, 5).high) == (0.0, 1.0)


def test_log_loss_and_brier_score_are_those_of_scikit_learn():
    generator = np.random.default_rng(1)
    said = generator.dirichlet((1, 1, 1), 200)
    truths = generator.integers(0, 3, 200)
    [row] = figures([choice(p, int(t)) for p, t in zip(said, truths, strict=True)])
    assert row.log_loss == pytest.approx(log_loss(truths, said))
    assert row.brier == pytest.approx(brier_score_loss(truths, said, scale_by_half=True))
    yes = generator.random(200)
    [row] = figures(nouls(yes, truths == 0))
    assert row.log_loss == pytest.approx(log_loss(truths == 0, yes))
    assert row.brier == pytest.approx(brier_score_loss(truths == 0, yes))


@pytest.mark.parametrize("yes", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("truth", [True, False])
def test_one_case_and_probabilities_of_exactly_nought_and_one_have_finite_figures(yes, truth):
    [row] = figures([noul(yes, truth)])
    assert row.log_loss == pytest.approx(log_loss([truth], [yes], labels=[False, True]), abs=1e-12)
    assert row.impossible == (yes == 1 - truth)
    assert row.separation.roc_auc is None
    assert all(math.isfinite(x) for x in (row.brier, row.calibration.error, row.calibration.by_chance))
    assert 0 <= row.accuracy.low <= row.accuracy.value <= row.accuracy.high <= 1


def test_a_yes_begins_at_one_half_as_it_is_printed_elsewhere():
    assert noul(0.5, True).is_right
    assert not noul(0.4999, True).is_right


def test_probabilities_that_mean_what_they_say_are_within_chance_and_others_are_not():
    generator = np.random.default_rng(2)
    said = generator.random(2000)
    truths = generator.random(2000) < said
    [good] = figures(nouls(said, truths))
    assert good.calibration.error <= good.calibration.by_chance
    [sure] = figures(nouls(np.where(said > 0.5, 0.99, 0.01), truths))
    assert sure.calibration.error > 0.2 > sure.calibration.by_chance


def test_confusion_counts_each_answer_by_its_truth():
    found = confusion([choice((0.8, 0.1, 0.1), 0), choice((0.8, 0.1, 0.1), 1), choice((0.8, 0.1, 0.1), 1)])
    assert found.options == ("a", "b")  # c is nowhere
    assert found.counts == ((1, 0), (2, 0))
    assert swaps(found, 5) == [("b", "a", 2)]


def test_confusion_of_cases_with_options_of_their_own_goes_by_name():
    judged = [choice((0.9, 0.1), 0, options=("x", "y")), choice((0.9, 0.1), 1, options=("y", "x"))]
    assert confusion(judged).counts == ((1, 1), (0, 0))


def test_the_errors_of_a_score_are_in_levels():
    def score(probabilities, truth):
        return choice(probabilities, truth, kind="score", options=("low", "mid", "high"))

    [row] = figures([score((0, 0.5, 0.5), 0), score((0, 0, 1), 2), score((1, 0, 0), 1)])
    assert row.levels.mean_absolute_error == pytest.approx((1.5 + 0 + 1) / 3)
    assert row.levels.bias == pytest.approx((1.5 - 1) / 3)
    assert row.levels.root_mean_squared_error == pytest.approx(math.sqrt((2.25 + 1) / 3))
    assert row.levels.within_one.part == 3
    assert row.levels.error_of_median == pytest.approx(2 / 3)
    [alone] = figures([score((1, 0, 0), 0)])
    assert alone.levels.quadratic_kappa is None


def test_all_questions_stand_first_and_only_beside_others():
    judged = [noul(0.9, True, question="one"), choice((1, 0, 0), 2, question="two")]
    assert [row.name for row in figures(judged)] == [ALL, "one", "two"]
    assert [row.name for row in figures(judged[:1])] == ["one"]
    assert figures(judged)[0].impossible == 1


def test_the_worst_answers_are_those_surest_of_what_is_wrong():
    judged = [noul(0.9, False, "sure"), noul(0.6, False, "less"), noul(0.9, True, "right")]
    assert [each.case for each in worst(judged, 5)] == ["sure", "less"]
