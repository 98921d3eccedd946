"""How long a prompt may be: the request's limit within the package's own. Nothing is ever cut."""

import pytest
from editing import edit

from d3serve.errors import MaxTokensExceeded
from d3serve.model.engine import DecisionEngine
from d3serve.schemas.questions import NoulQuestion


def test_a_prompt_that_is_too_long_names_its_question_and_is_not_cut(engine):
    short, long = (NoulQuestion(type="noul", instructions="x" * n) for n in (1, 400))
    with pytest.raises(MaxTokensExceeded) as refused:
        engine.prepare("state", {"short": short, "long": long}, max_tokens=300)
    assert refused.value.field == "questions.long"
    assert refused.value.details["limit"] == 300
    assert refused.value.details["tokens"] > 300
    engine.prepare("state", {"long": long}, max_tokens=refused.value.details["tokens"])
    with pytest.raises(MaxTokensExceeded):
        engine.prepare("state", {"short": short}, max_tokens=0)


def test_the_models_own_limit_wins(package):
    edit(package, "decision_config.json", lambda c: c.update(max_length=100))
    engine = DecisionEngine.load(str(package), device="cpu")
    with pytest.raises(MaxTokensExceeded):
        engine.prepare("x" * 100, {"q": NoulQuestion(type="noul")}, max_tokens=10_000)


LIMITS = {
    "validated_length": lambda p: edit(p, "decision_config.json", lambda c: c.update(validated_length=100)),
    "max_length": lambda p: edit(p, "decision_config.json", lambda c: c.update(max_length=100)),
    "positions": lambda p: edit(
        p, "config.json", lambda c: c["text_config"].update(max_position_embeddings=100)
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_without_a_limit_the_packages_own_holds(limit, package):
    LIMITS[limit](package)
    engine = DecisionEngine.load(str(package), device="cpu")
    question = {"q": NoulQuestion(type="noul")}
    with pytest.raises(MaxTokensExceeded, match="the limit of 100"):
        engine.prepare("x" * 100, question)
    if limit == "validated_length":  # past it on request
        engine.prepare("x" * 100, question, max_tokens=1_000)
