"""A picture, a recording or a file is refused by name wherever it stands; a record that mentions one is data."""

import pytest

from d3serve.api.dialect import to_system_one
from d3serve.api.validation import check_request
from d3serve.errors import InvalidRequest
from d3serve.settings import Settings

SETTINGS = Settings()
URL = "https://example.com/x"
PARTS = [
    {"type": "input_image", "image_url": URL, "detail": "low"},
    {"type": "input_image", "file_id": "file-1"},
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    {"type": "image", "image": "data:image/png;base64,AAAA"},
    {"type": "image", "format": "png", "data_base64": "AAAA"},
    {"type": "input_file", "file_data": "AAAA", "filename": "x.pdf"},
    {"type": "file", "file": {"file_id": "file-1"}},
    {"type": "input_video", "video_url": URL},
    {"type": "video_url", "video_url": {"url": URL}},
    {"type": "video", "video": [URL], "fps": 2},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": URL}},
    {"type": "audio", "url": URL},
]
BARE = [{"type": "input_image"}, {"type": "document", "source": {"data": "AAAA"}}, {"type": "media", "x": 1}]
DATA = [
    {"type": "video", "title": "How to knit", "url": URL},
    {"type": "image", "caption": "a cat"},
    {"type": "file", "path": "/etc/hosts", "owner": "root"},
    {"type": "file", "name": "a.txt", "size": 3},
    {"type": "document", "content": "Dear customer"},
    {"type": "image"},
    {"type": ["image"], "image": 1},
    {"type": {"image": 1}},
    {"image_url": URL},
    {"kind": "image", "image": URL},
]
QUESTION = {"type": "noul", "instructions": "Is it spam?"}
PREDICATE = {"type": "predicate", "instructions": "Is it spam?"}
NESTED = {
    "a list": lambda part: [part],
    "a message": lambda part: [{"role": "user", "content": ["Look:", part]}],
    "deep inside": lambda part: {"ticket": {"thread": [{"body": [[part]]}]}},
}
OPENAI = {
    "a message": lambda part: {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}, part]}]
    },
    "a later message": lambda part: {
        "input": [{"role": "user", "content": "x"}, {"role": "user", "content": [part]}]
    },
    "a tool's output": lambda part: {"input": [{"type": "function_call_output", "output": [part]}]},
    "a list in a list": lambda part: {"input": [{"role": "user", "content": [[part]]}]},
    "instructions": lambda part: {"questions": [PREDICATE | {"instructions": [part]}]},
    "among the items": lambda part: {"input": [part]},
}


def refused(check, *request):
    with pytest.raises(InvalidRequest) as caught:
        check(*request)
    assert caught.value.code == "unsupported_modality"
    return caught.value


def of_state(state):
    return check_request({"model": "m", "state": state, "questions": {"q": QUESTION}}, SETTINGS)


def of_question(question):
    return check_request({"model": "m", "state": "x", "questions": {"q": question}}, SETTINGS)


def of_openai(fields):
    return to_system_one({"model": "m", "input": "x", "questions": [PREDICATE]} | fields, SETTINGS)


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("nested", NESTED)
def test_a_medium_in_a_state(nested, part):
    error = refused(of_state, NESTED[nested](part))
    assert error.field == "state"
    assert f'of type "{part["type"]}"' in error.message
    assert "text and JSON only" in error.message


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_medium_in_a_question(part):
    assert refused(of_question, QUESTION | {"instructions": [part]}).field == "questions.q.instructions"
    for question in (
        {"type": "choice", "criteria": {"a": [part], "b": None}},
        {"type": "noul", "criteria": {"true": part}},
        {"type": "score", "criteria": ["low", {"like": part}]},
    ):
        assert refused(of_question, question).field == "questions.q.criteria"


@pytest.mark.parametrize("part", [*PARTS, *BARE], ids=str)
@pytest.mark.parametrize("place", OPENAI)
def test_a_medium_in_openais_dialect(place, part):
    error = refused(of_openai, OPENAI[place](part))
    assert error.field in ("input", "questions.0")
    assert f'of type "{part["type"]}"' in error.message


def test_the_place_is_told():
    assert "at /ticket/thread/0/body/0/0 " in refused(of_state, NESTED["deep inside"](PARTS[0])).message


@pytest.mark.parametrize("record", DATA, ids=str)
def test_a_record_that_mentions_a_medium_is_data(record):
    assert of_state([record])
    assert of_state({"rows": [record, record]})
    assert of_openai({"input": [{"role": "user", "content": [{"type": "input_json", "data": record}]}]})


def test_texts_of_every_name_are_text():
    parts = [
        {"type": kind, "text": "x"}
        for kind in ("input_text", "output_text", "text", "refusal", "summary_text")
    ]
    assert of_openai({"input": [{"role": "user", "content": parts}]})
    assert of_state([{"role": "user", "content": parts}])
