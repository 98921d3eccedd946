"""What certainly is too long is refused at the door, wherever it stands; what may fit is let through."""

import pytest

from d3serve.api.dialect import to_system_one
from d3serve.api.validation import check_request
from d3serve.errors import InvalidRequest
from d3serve.settings import Settings

SETTINGS = Settings(
    max_interactive_tokens=1_000,
    max_offline_tokens=3_000,
    max_job_tokens_interactive=2_000,
    max_job_tokens_offline=9_000,
)
LIMITS = {"interactive": (1_000, 2_000), "offline": (3_000, 9_000), None: (3_000, 9_000)}
NOUL = {"type": "noul", "instructions": "Is it spam?"}
PLACES = {
    "instructions": lambda text: {"type": "noul", "instructions": text},
    "JSON instructions": lambda text: {"type": "noul", "instructions": {"read": [text]}},
    "an option's description": lambda text: {"type": "choice", "criteria": {"a": text, "b": None}},
    "an option's name": lambda text: {"type": "choice", "criteria": {text: None, "b": None}},
    "a JSON description": lambda text: {"type": "choice", "criteria": {"a": {"x": text}, "b": None}},
    "what yes means": lambda text: {"type": "noul", "criteria": {"true": text}},
    "what no means": lambda text: {"type": "noul", "criteria": {"false": text, "true": "x"}},
    "a level": lambda text: {"type": "score", "criteria": [text, "much"]},
}


def check(state="hello", lane=None, **questions):
    request = {"model": "m", "state": state, "questions": questions or {"q": NOUL}}
    return check_request(request | ({"job": {"lane": lane}} if lane else {}), SETTINGS)


def refusal(**request):
    with pytest.raises(InvalidRequest) as caught:
        check(**request)
    assert caught.value.code == "max_tokens_exceeded"
    return caught.value


@pytest.mark.parametrize("lane", LIMITS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("char", ["é", "x", "漢", "\U0001f600"])
def test_a_question_that_no_tokenizer_can_make_fit(place, lane, char):
    """One of 47 MB stopped a worker for minutes: its state alone was bounded."""
    prompt, _ = LIMITS[lane]
    long = char * (48 * prompt // len(char.encode()) + 1)
    error = refusal(lane=lane, q=PLACES[place](long), other=NOUL)
    assert error.field == "questions.q"
    assert f"maximum context length of {prompt} tokens" in error.message
    assert check(lane=lane, q=PLACES[place](long[: len(long) * 9 // 10]))


@pytest.mark.parametrize("lane", LIMITS)
@pytest.mark.parametrize("state", [lambda text: text, lambda text: [text], lambda text: {"a": {text: 1}}])
def test_a_state_that_no_tokenizer_can_make_fit(state, lane):
    prompt, _ = LIMITS[lane]
    error = refusal(lane=lane, state=state("x" * (48 * prompt + 1)))
    assert error.field == "state"
    assert f"{prompt} tokens" in error.message
    assert refusal(lane=lane, state=state(" " * (128 * prompt + 1))).field == "state"
    assert check(lane=lane, state=state(" " * (127 * prompt)))


def test_a_state_and_a_question_that_fit_alone_but_not_together():
    error = refusal(state="x" * (48 * 2_000), q={"type": "noul", "instructions": "x" * (48 * 1_500)})
    assert error.field == "questions.q"


@pytest.mark.parametrize("lane", LIMITS)
def test_a_job_whose_questions_fit_one_by_one_but_not_together(lane):
    """256 legal questions of 3,000 tokens took the interactive lane for 197 s."""
    prompt, job = LIMITS[lane]
    one = {"type": "noul", "instructions": "x" * (48 * (prompt - 100))}
    most = job // (prompt - 100)
    assert check(lane=lane, **{f"q{i}": one for i in range(most)})
    error = refusal(lane=lane, **{f"q{i}": one for i in range(most + 1)})
    assert error.field == "questions"
    assert f"{job} tokens" in error.message


def test_padded_columns_are_not_taken_for_more_tokens_than_they_have():
    """2.2 MB of a padded table are 78,000 tokens; 16 bytes a token were thought to be the most that text has."""
    row = "".join(f"{name:<60}" for name in ("invoice", "customer", "amount", "paid"))
    table = "\n".join([row] * (2_165_999 // 241))
    request = {"model": "m", "state": table, "questions": {"q": NOUL}}
    assert check_request(request, Settings())
    ruled = "\n".join(["-" * 110] * (2_165_999 // 111))
    assert check_request(request | {"state": ruled}, Settings())


def test_openais_dialect_is_bounded_alike():
    request = {
        "model": "m",
        "input": "hello",
        "questions": [{"type": "predicate", "instructions": "x" * 145_000}],
    }
    with pytest.raises(InvalidRequest) as caught:
        to_system_one(request, SETTINGS)
    assert (caught.value.code, caught.value.field) == ("max_tokens_exceeded", "questions.0")
