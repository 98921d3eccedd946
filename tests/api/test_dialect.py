"""OpenAI's dialect: what is refused, what it becomes, what comes back."""

from typing import get_type_hints

import pytest
from openai.types import Decision, DecisionCreateParams, decision_create_params

from d3serve.api.dialect import answer_names, from_system_one, to_system_one
from d3serve.api.openai_models import (
    ChoiceAsked,
    OpenAIDecision,
    OpenAIDecisionRequest,
    PredicateAsked,
    ScoreAsked,
)
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
    "a list for a type": (body({**PREDICATE, "type": []}), "invalid_question", "questions.0"),
    "an object for a type": (body({**PREDICATE, "type": {}}), "invalid_question", "questions.0"),
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
    "401 questions": (body(*[PREDICATE] * 401), "too_many_questions", "questions"),
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
    assert OpenAIDecision.model_validate(back).model_dump(exclude_unset=True) == back, "described as it is"


NOT_LOST = {
    "a misspelt description": (
        body({"type": "choice", "choices": [{"value": "a", "descripton": "x"}, {"value": "b"}]}),
        "questions.0.choices.0.descripton",
        "there are value, description",
    ),
    "a misspelt label": (
        body({"type": "score", "levels": [{"label": "a", "lable": "x"}, {"label": "b"}]}),
        "questions.0.levels.0.lable",
        "there are label, description",
    ),
    "a description that is no text": (
        body({"type": "score", "levels": [{"label": "a", "description": {"b": 1}}, {"label": "b"}]}),
        "questions.0.levels",
        "must be a string, not an object of 1",
    ),
    "a number for instructions": (
        body({"type": "predicate", "instructions": 3}),
        "questions.0.instructions",
        "must be a string or a list of parts, not 3",
    ),
    "a choice without a value": (
        body({"type": "choice", "choices": [{"description": "x"}]}),
        "questions.0.choices.0.value",
        "is required",
    ),
    "a crowd of fields": (
        body({**PREDICATE, **{str(i): i for i in range(100_000)}}),
        "questions.0",
        "holds 100002 fields",
    ),
    "a crowd of fields in a choice": (
        body({"type": "choice", "choices": [{"value": "a", **{str(i): i for i in range(100_000)}}]}),
        "questions.0.choices.0",
        "holds 100001 fields",
    ),
    "a blank model": (body(model=" "), "model", 'must name a model, not " "'),
}


@pytest.mark.parametrize("case", NOT_LOST)
def test_nothing_that_was_written_is_left_out_silently(case):
    sent, field, words = NOT_LOST[case]
    with pytest.raises(InvalidRequest, match=words) as caught:
        to_system_one(sent, SETTINGS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (body(input=3), "input must be a string or a list, not 3"),
        (body(questions={}), "questions must be a list with at least one question, not an object of 0"),
        (body(temperature=0), "temperature is not a field of a request; there are model, input, questions, "),
        (body("spam?"), 'questions.0 must be a predicate, a choice or a score, not "spam?"'),
        (body({"type": "noul"}), 'questions.0 must be a predicate, a choice or a score, not "noul"'),
        (body({"x": 1}), "questions.0 must be a predicate, a choice or a score, not null"),
        (body({**PREDICATE, "name": 1}), "questions.0.name must be a string, not 1"),
        (body({"type": "choice", "choices": ["a"]}), "choices must be a list of objects, not a list of 1"),
        (body(choice("a", 2)), "choices has a value 2; a value is text or a bool"),
        (body(score("a", 2)), "levels has a label 2; a label is text"),
    ],
)  # fmt: skip
def test_refusals_keep_their_words(sent, words):
    with pytest.raises(InvalidRequest) as caught:
        to_system_one(sent, SETTINGS)
    assert words in caught.value.message


def test_the_models_have_the_fields_of_the_stock_client():
    """A field that the client learns must be taken or refused on purpose, and none of an answer be missing."""
    asked = get_type_hints(DecisionCreateParams)
    assert asked.keys() == OpenAIDecisionRequest.model_fields.keys()
    assert Decision.model_fields.keys() <= OpenAIDecision.model_fields.keys()
    kinds = {"predicate": PredicateAsked, "choice": ChoiceAsked, "score": ScoreAsked}
    params = {
        "predicate": decision_create_params.QuestionQuestionParamPredicate,
        "choice": decision_create_params.QuestionQuestionParamChoice,
        "score": decision_create_params.QuestionQuestionParamScore,
    }
    for kind, model in kinds.items():
        assert model.model_fields.keys() == get_type_hints(params[kind]).keys(), kind
