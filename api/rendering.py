"""How options read as prompt text, as far as validation must know it: are two of them the same line?"""

import json
from collections.abc import Sequence

from pydantic import JsonValue

from d3serve.schemas import ChoiceQuestion, NoulQuestion, Question

NO, YES = "No / false", "Yes / true"


def option_texts(question: Question) -> Sequence[str]:
    """The text of each option, in the order in which the prompt lists them."""
    if isinstance(question, ChoiceQuestion):
        return [
            name if description is None else f"{name}: {value_text(description)}"
            for name, description in question.criteria.items()
        ]
    if isinstance(question, NoulQuestion):
        criteria = question.criteria
        no, yes = (criteria.false, criteria.true) if criteria else (None, None)
        return [value_text(no) if no else NO, value_text(yes) if yes else YES]
    return [value_text(level) for level in question.criteria]


def value_text(value: JsonValue) -> str:
    """A string as it is; anything else as JSON text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
