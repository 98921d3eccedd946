"""The bundled checkpoint answers held-out packages as well as its card says, and only with the right mask."""

import dataclasses
import json

import pytest

from d3serve.model.engine import DecisionEngine
from d3serve.model.manifest import check_package
from d3serve.schemas import DecisionRequest

PACKAGES = 150  # of the 300 in the sample: seconds on two cores


def answers(engine, cases, turn):
    """Wire answers of each case, `turn(questions)` having changed the questions first; several jobs a pass."""
    requests = [DecisionRequest(model="x", state=c.state, questions=turn(c.questions)) for c in cases]
    jobs = [engine.prepare(request.state, request.questions) for request in requests]
    decided = [job for start in range(0, len(jobs), 16) for job in engine.decide(jobs[start : start + 16])]
    return [{name: a.model_dump(mode="json") for name, a in job.answers.items()} for job in decided]


def scored(heldout, cases, found):
    return [one for case, each in zip(cases, found, strict=True) for one in heldout.score(case, each)]


def backwards(questions):
    """Every choice with its options in reverse order."""
    turned = {}
    for name, question in questions.items():
        options = question["criteria"]
        is_choice = question["type"] == "choice"
        turned[name] = question | ({"criteria": dict(reversed(options.items()))} if is_choice else {})
    return turned


@pytest.fixture(scope="module")
def cases(heldout):
    return heldout.read_cases(PACKAGES)


@pytest.fixture(scope="module")
def found(engine, cases):
    return answers(engine, cases, lambda questions: questions)


def test_the_package_is_whole_and_small(checkpoint):
    report = check_package(checkpoint)
    assert report.problems == ()
    assert report.attention_mode == "prefix_bidir"
    assert sum(path.stat().st_size for path in checkpoint.iterdir()) <= 20_000_000


def test_held_out_accuracy(heldout, cases, found):
    groups = heldout.by_family(scored(heldout, cases, found))
    assert heldout.accuracy(groups["section"]) >= 0.86
    assert heldout.accuracy(groups["noul"]) >= 0.92
    assert heldout.nll(groups["section"]) <= 0.45
    assert heldout.nll(groups["noul"]) <= 0.18


def test_it_beats_the_regressions_on_sections(engine, heldout):
    """On the sample's 300 packages, whose baselines stand in its first line; the card has the whole split."""
    every = [
        dataclasses.replace(case, questions={name: question})
        for case in heldout.read_cases()
        for name, question in case.questions.items()
        if name.endswith("-section")
    ]
    assert len(every) == 300
    right = heldout.accuracy(scored(heldout, every, answers(engine, every, lambda questions: questions)))
    simpler = heldout.read_head()["section_accuracy_of_baselines"]
    assert set(simpler) == {"majority", "logistic regression, word counts", "logistic regression, TF-IDF"}
    assert right > max(simpler.values())


def test_probabilities_mean_what_they_say(heldout, cases, found):
    every = scored(heldout, cases, found)
    mean_confidence = sum(each.probabilities[each.decision] for each in every) / len(every)
    assert abs(mean_confidence - heldout.accuracy(every)) <= 0.05


def test_the_order_of_options_rarely_matters(engine, cases, found):
    turned = answers(engine, cases, backwards)
    pairs = [
        (one[name]["choice"], other[name]["choice"])
        for one, other in zip(found, turned, strict=True)
        for name in one
        if one[name]["type"] == "choice"
    ]
    assert len(pairs) > 150
    assert sum(one != other for one, other in pairs) / len(pairs) <= 0.05


def test_a_causal_mask_loses(heldout, cases, found, copied):
    """The mask is part of what was learnt: a build that masks wrongly would be noticed here."""
    path = copied / "decision_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_mode": "causal"}))
    causal = scored(
        heldout, cases, answers(DecisionEngine.load(str(copied)), cases, lambda questions: questions)
    )
    right = scored(heldout, cases, found)
    changed = sum(a.decision != b.decision for a, b in zip(causal, right, strict=True))
    assert changed / len(right) >= 0.03
    assert heldout.accuracy(causal) < heldout.accuracy(right)
    assert heldout.nll(causal) >= heldout.nll(right) + 0.015


def test_an_empty_state_answers_base_rates(engine):
    question = {"type": "noul", "instructions": "Is this a game?"}
    request = DecisionRequest(model="x", state="", questions={"game": question})
    [job] = engine.decide([engine.prepare(request.state, request.questions)])
    assert 0.2 <= job.answers["game"].noul <= 0.8, "nothing is known, so nothing is sure"
