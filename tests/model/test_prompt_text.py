"""The text of a prompt, character for character."""

import pytest

from d3serve.model.prompt import question_part, state_part
from d3serve.schemas.questions import ChoiceQuestion, NoulCriteria, NoulQuestion, ScoreQuestion

CODES = ["A", "B", "C", "AA"]


def test_a_choice():
    question = ChoiceQuestion(
        type="choice",
        instructions="Which team?",
        criteria={"billing": "charges", "other": None, "empty": "", "json": {"b": 1, "a": ["é", 1.0, None]}},
    )
    assert state_part("Paid twice.") + question_part("q", question, CODES) == (
        "State:\nPaid twice.\n\nQuestion:\nWhich team?\n\nOptions:\nA: billing: charges\nB: other\nC: empty: \n"
        'AA: json: {"b": 1, "a": ["é", 1.0, null]}\n\nReply with only the code of the best option.'
    )


CRITERIA = [
    (None, ["No / false", "Yes / true"]),
    (NoulCriteria(), ["No / false", "Yes / true"]),
    (NoulCriteria(false="fine", true="broken"), ["fine", "broken"]),
    (NoulCriteria(true="broken"), ["No / false", "broken"]),
    (NoulCriteria(false="fine", true=""), ["fine", "Yes / true"]),
    (NoulCriteria(false={"a": 1}, true=[2]), ['{"a": 1}', "[2]"]),
]


@pytest.mark.parametrize(("criteria", "texts"), CRITERIA)
def test_a_noul_lists_no_before_yes(criteria, texts):
    assert NoulQuestion(type="noul", criteria=criteria).options() == texts


def test_a_score_lists_its_levels():
    question = ScoreQuestion(type="score", criteria=["low", {"level": 2}, 3])
    assert question_part("q", question, CODES) == (
        'Question:\nChoose the best matching option.\n\nOptions:\nA: low\nB: {"level": 2}\nC: 3\n\n'
        "Reply with only the code of the best option."
    )


@pytest.mark.parametrize("instructions", [None, "", {}, [], 0, False])
def test_empty_instructions_get_the_default(instructions):
    text = question_part("q", NoulQuestion(type="noul", instructions=instructions), CODES)
    assert text.startswith("Question:\nChoose the best matching option.\n\n")


@pytest.mark.parametrize(
    ("instructions", "text"), [({"b": 1, "a": 2}, '{"b": 1, "a": 2}'), ("  x ", "  x "), (1.50, "1.5")]
)
def test_other_instructions_are_rendered_as_they_are(instructions, text):
    assert question_part("q", NoulQuestion(type="noul", instructions=instructions), CODES).startswith(
        f"Question:\n{text}\n\nOptions:"
    )
