"""OpenAI's dialect: what is refused, what it becomes, what comes back."""

import pytest

from d3serve.api.dialect import answer_names, from_system_one, to_system_one
from d3serve.errors import InvalidRequest
from d3serve.settings import Settings

SETTINGS = Settings()
PREDICATE = {"type": "predicate", "instructions": "It is spam."}


def body(*questions, **fields):
    return {"model": "m", "input": "hello", "questions": list(questions) or [PREDICATE]} | fields


def choice(*values, **fields):
    return {
        "type": "choice",
        "instructions": "Which?",
        "choices": [{"value": value} for value in values],
    } | fields


def score(*labels, **fields):
    return {
        "type": "score",
        "instructions": "How?",
        "levels": [{"label": label} for label in labels],
    } | fields


IMAGE = {"type": "input_image", "image_url": "https://example.com/x.png"}
REFUSED = {
    "no questions": (body(questions=[]), "invalid_request", "questions"),
    "a map of questions": (body(questions={"q": PREDICATE}), "invalid_request", "questions"),
    "an unknown field": (body(temperature=0), "invalid_request", "temperature"),
    "a number for input": (body(input=3), "invalid_request", "input"),
    "an image in a message": (
        body(input=[{"role": "user", "content": [IMAGE]}]),
        "unsupported_modality",
        "input",
    ),
    "an image in a tool's output": (
        body(input=[{"type": "function_call_output", "output": [IMAGE]}]),
        "unsupported_modality",
        "input",
    ),
    "an image in instructions": (
        body({"type": "predicate", "instructions": [IMAGE]}),
        "unsupported_modality",
        "questions.0",
    ),
    "a question that is text": (body("spam?"), "invalid_question", "questions.0"),
    "an unknown type": (body({"type": "noul"}), "invalid_question", "questions.0"),
    "a misspelt field": (
        body({**PREDICATE, "intructions": "x"}),
        "invalid_question",
        "questions.0.intructions",
    ),
    "a name that is no text": (body({**PREDICATE, "name": 1}), "invalid_question", "questions.0.name"),
    "no instructions": (body({"type": "predicate"}), "invalid_question", "questions.0"),
    "no choices": (body({"type": "choice", "instructions": "x"}), "invalid_question", "questions.0.choices"),
    "one choice": (body(choice("a")), "invalid_question", "questions.0.criteria"),
    "256 choices": (body(choice(*map(str, range(256)))), "too_many_options", "questions.0.criteria"),
    "a choice twice": (body(choice("a", "a", "b")), "invalid_question", "questions.0.choices"),
    "true and the word for it": (body(choice("true", True)), "invalid_question", "questions.0.choices"),
    "a number for a value": (body(choice(1, 2)), "invalid_question", "questions.0.choices"),
    "choices that are no objects": (
        body({"type": "choice", "choices": ["a", "b"]}),
        "invalid_question",
        "questions.0.choices",
    ),
    "eleven levels": (body(score(*map(str, range(11)))), "too_many_options", "questions.0.criteria"),
    "levels alike": (body(score("a", "a")), "invalid_question", "questions.0.criteria"),
    "a label that is no text": (body(score(1, 2)), "invalid_question", "questions.0.levels"),
    "257 questions": (body(*[PREDICATE] * 257), "too_many_questions", "questions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_code_and_field(case):
    sent, code, field = REFUSED[case]
    with pytest.raises(InvalidRequest) as caught:
        to_system_one(sent, SETTINGS)
    assert (caught.value.code, caught.value.field) == (code, field)


def test_what_it_becomes():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
    ]
    parts = [{"type": "input_text", "text": "Which?"}, {"type": "input_json", "data": {"b": 1, "a": "é"}}]
    request = to_system_one(
        body(
            PREDICATE,
            choice("x", False, instructions=parts),
            score("low", "high"),
            input=messages,
            prompt_cache_key="k",
        ),
        SETTINGS,
    )
    assert request.state == messages
    assert list(request.questions) == ["0", "1", "2"]
    noul, which, how = request.questions.values()
    assert (noul.type, noul.instructions) == ("noul", "It is spam.")
    assert which.instructions == 'Which?\n{"b": 1, "a": "é"}'
    assert which.criteria == {"x": None, "false": None}
    assert how.criteria == ["low", "high"]


def test_descriptions_stand_beside_their_labels():
    question = score("low", "high")
    question["levels"][1]["description"] = "at once"
    described = choice("a", "b")
    described["choices"][0]["description"] = "the first"
    request = to_system_one(body(question, described), SETTINGS)
    assert request.questions["0"].criteria == ["low", "high: at once"]
    assert request.questions["1"].criteria == {"a": "the first", "b": None}


def test_what_comes_back_is_in_order_with_values_of_their_own_kind():
    sent = body({**PREDICATE, "name": "spam"}, choice("x", False), score("low", "high"), PREDICATE)
    response = {
        "model": "m@1",
        "answers": {
            "3": {"type": "error", "error": {"code": "max_tokens_exceeded", "message": "too long"}},
            "2": {
                "type": "score",
                "score": 0.9,
                "confidence": 0.5,
                "legend": {},
                "probabilities": {"0": 0.1, "1": 0.9},
            },
            "1": {
                "type": "choice",
                "choice": "false",
                "confidence": 0.5,
                "probabilities": {"x": 0.2, "false": 0.8},
            },
            "0": {"type": "noul", "noul": 0.25},
        },
        "usage": {"input_tokens": 90, "computed_tokens": 30, "output_tokens": 0},
    }
    back = from_system_one(answer_names(sent), response, "job_1")
    assert [answer["type"] for answer in back["answers"]] == ["predicate", "choice", "score", "refusal"]
    assert [answer["name"] for answer in back["answers"]] == ["spam", None, None, None]
    assert back["answers"][1]["choice"] is False
    assert back["answers"][1]["probabilities"][1] == {"value": False, "probability": 0.8}
    assert back["answers"][2]["probabilities"][1] == {"value": 1, "label": "high", "probability": 0.9}
    assert back["usage"]["input_tokens_details"]["cached_tokens"] == 60
    assert back["id"] == "job_1"
