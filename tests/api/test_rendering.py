"""What validation takes for the text of an option is what the prompt says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from d3serve.api.rendering import option_texts
from d3serve.schemas import Question

QUESTION = TypeAdapter(Question)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
VALUE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
DEEP = VALUE | st.lists(VALUE, max_size=3) | st.dictionaries(TEXT, VALUE, max_size=3)
QUESTIONS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("choice"), "criteria": st.dictionaries(TEXT, DEEP, min_size=2, max_size=5)}
    ),
    st.fixed_dictionaries({"type": st.just("score"), "criteria": st.lists(DEEP, min_size=2, max_size=5)}),
    st.fixed_dictionaries(
        {
            "type": st.just("noul"),
            "criteria": st.none() | st.fixed_dictionaries({}, optional={"true": DEEP, "false": DEEP}),
        }
    ),
)


@given(QUESTIONS)
def test_validation_and_prompt_read_an_option_alike(raw):
    prompt = pytest.importorskip("d3serve.model.prompt")
    question = QUESTION.validate_python(raw)
    assert list(option_texts(question)) == list(prompt.option_texts(question))
