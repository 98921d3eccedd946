"""The temperature depends on the client's job, never on the turn that it was merged into."""

import math

import pytest
from editing import edit

from d3serve.model.engine import DecisionEngine
from d3serve.model.package import open_package
from d3serve.schemas.questions import NoulQuestion

BUCKETS = {"max_questions": [1, 4, 16], "temperature": [2.0, 1.0, 0.5, 0.25]}
ASKED = NoulQuestion(type="noul", instructions="Urgent?")


@pytest.fixture
def package(package):
    edit(package, "decision_config.json", lambda values: values.update(temperature_by_questions=BUCKETS))
    return package


def test_each_number_of_questions_has_its_bucket(package):
    config = open_package(package).decision
    expected = {1: 2.0, 2: 1.0, 4: 1.0, 5: 0.5, 16: 0.5, 17: 0.25, 256: 0.25}
    assert {n: config.temperature_for(n) for n in expected} == expected


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_a_merged_turn_keeps_each_jobs_own_temperature(package):
    engine = DecisionEngine.load(str(package), device="cpu")

    def job(count):
        others = {f"q{n}": NoulQuestion(type="noul", instructions=f"Is it {n}?") for n in range(count - 1)}
        return engine.prepare("a state", {"asked": ASKED} | others)

    decided = engine.decide([job(n) for n in (1, 3, 10, 20)])
    logits = [logit(each.answers["asked"].noul) for each in decided]
    for ours, factor in zip(logits[1:], (2, 4, 8), strict=True):
        assert ours == pytest.approx(logits[0] * factor, rel=1e-4)
    (alone,) = engine.decide([job(1)])
    assert logit(alone.answers["asked"].noul) == pytest.approx(logits[0], rel=1e-4)
