"""What is wrong with a value, in our words: what it must be, and the few characters of it that may be shown."""

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import ErrorDetails

TOLD: Final = "told"  # the type of an error that brings its clause along, as `told`

_KINDS: Final[Mapping[str, str]] = {
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
}


def complaint(error: ErrorDetails) -> str:
    """One pydantic error as a clause: `must be 'a' or 'b', not "c"`."""
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == TOLD:
        return str(context["told"])
    if kind == "string_too_long":
        return f"has {len(value)} characters; there may be at most {context['max_length']}"
    if kind == "string_too_short":
        return f"has {len(value)} characters; there must be at least {context['min_length']}"
    clause = _KINDS.get(kind) or error["msg"].removeprefix("Value error, ")
    for subject in ("Input should", "String should"):
        clause = clause.replace(subject, "must")
    return f"{clause}, not {shown(value)}"


def shown(value: Any, limit: int = 60) -> str:
    """`value` for a message: JSON in ASCII without control characters, at most `limit` characters of it."""
    if isinstance(value, str):
        text = json.dumps(value[: limit + 1])
    elif isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"
