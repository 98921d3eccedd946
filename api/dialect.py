"""OpenAI's decisions dialect in terms of System One: `input` is a state, a predicate is a noul. Pure.

Media are refused. A list of messages stays the list that it is: the model reads it as JSON text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from d3serve.api.media_parts import media_parts
from d3serve.api.validation import Findings, check_request
from d3serve.questions import MAX_LEVELS, MAX_OPTIONS
from d3serve.schemas import DecisionRequest
from d3serve.settings import Settings
from d3serve.text.wording import shown

FIELDS: Final = (
    "model",
    "input",
    "questions",
    "prompt_cache_key",
    "prompt_cache_options",
    "safety_identifier",
)
QUESTION_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "predicate": frozenset({"type", "name", "instructions"}),
    "choice": frozenset({"type", "name", "instructions", "choices"}),
    "score": frozenset({"type", "name", "instructions", "levels"}),
}
_INSTRUCTIONS: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


def _question_schema(kind: str, entries: str, entry: Mapping[str, Any], most: int) -> dict[str, Any]:
    listed = {"type": "array", "items": entry, "minItems": 2, "maxItems": most}
    return {
        "type": "object",
        "required": ["type", "instructions", entries],
        "properties": {
            "type": {"const": kind}, "name": {"type": "string"}, "instructions": _INSTRUCTIONS, entries: listed,
        },
    }  # fmt: skip


_VALUE: Final = {
    "type": "object",
    "required": ["value"],
    "properties": {"value": {"type": ["string", "boolean"]}},
}
_LABEL: Final = {"type": "object", "required": ["label"], "properties": {"label": {"type": "string"}}}
SCHEMA: Final = {
    "title": "OpenAIDecisionRequest",
    "type": "object",
    "required": ["model", "input", "questions"],
    "properties": {
        "model": {"type": "string"},
        "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "questions": {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "required": ["type", "instructions"],
                        "properties": {"type": {"const": "predicate"}, "instructions": _INSTRUCTIONS},
                    },
                    _question_schema("choice", "choices", _VALUE, MAX_OPTIONS),
                    _question_schema("score", "levels", _LABEL, MAX_LEVELS),
                ]
            },
        },
    },
}


def is_openai(payload: Mapping[str, Any]) -> bool:
    """Whether a body speaks this dialect; System One's says `state`."""
    return "input" in payload and "state" not in payload


def to_system_one(payload: Mapping[str, Any], settings: Settings) -> DecisionRequest:
    """The request in System One's terms; its questions are named by their places, `0`, `1` and so on.

    Raises:
        InvalidRequest: or a subclass, as `check_request` does.
    """
    findings = Findings()
    for name in payload:
        if name not in FIELDS:
            findings.add(
                "invalid_request", (name,), f"is not a field of a request; there are {', '.join(FIELDS)}"
            )
    state = payload["input"]
    if not isinstance(state, str | list):
        findings.add("invalid_request", ("input",), f"must be a string or a list, not {shown(state)}")
    for told in media_parts(state, messages=True):
        findings.add("unsupported_modality", ("input",), told)
    questions = payload.get("questions")
    if not isinstance(questions, list) or not questions:
        findings.add(
            "invalid_request",
            ("questions",),
            f"must be a list with at least one question, not {shown(questions)}",
        )
        questions = []
    if len(questions) > (most := settings.max_questions_per_job):
        told = f"holds {len(questions)} questions; a job may hold {most}"
        findings.add("too_many_questions", ("questions",), told)
        questions = []
    mapped = {str(place): _question(raw, place, findings) for place, raw in enumerate(questions)}
    findings.raise_if_any()
    request = {"model": payload.get("model"), "state": state, "questions": mapped}
    return check_request(request, settings)


def _question(raw: Any, place: int, findings: Findings) -> dict[str, Any]:
    path = ("questions", place)
    if not isinstance(raw, dict) or raw.get("type") not in QUESTION_FIELDS:
        found = shown(raw.get("type")) if isinstance(raw, dict) else shown(raw)
        findings.add("invalid_question", path, f"must be a predicate, a choice or a score, not {found}")
        return {}
    for name in raw.keys() - QUESTION_FIELDS[raw["type"]]:
        findings.add("invalid_question", (*path, name), "is not a field here: check its spelling")
    if not isinstance(raw.get("name"), str | None):
        findings.add("invalid_question", (*path, "name"), f"must be a string, not {shown(raw['name'])}")
    instructions = raw.get("instructions")
    for told in media_parts(instructions, messages=True):
        findings.add("unsupported_modality", path, told)
    question: dict[str, Any] = {"instructions": _text(instructions)}
    match raw["type"]:
        case "predicate":
            return {"type": "noul", **question}
        case "choice":
            return {"type": "choice", **question, "criteria": _criteria(raw, path, findings)}
        case _:
            return {"type": "score", **question, "criteria": _levels(raw, path, findings)}


def _criteria(raw: Mapping[str, Any], path: tuple[str | int, ...], findings: Findings) -> dict[str, Any]:
    criteria: dict[str, Any] = {}
    for choice in _entries(raw, "choices", path, findings):
        value = choice.get("value")
        if not isinstance(value, str | bool):
            findings.add(
                "invalid_question",
                (*path, "choices"),
                f"has a value {shown(value)}; a value is text or a bool",
            )
            continue
        if option_name(value) in criteria:
            findings.add(
                "invalid_question",
                (*path, "choices"),
                f"has two options that both read {shown(option_name(value))}",
            )
        criteria[option_name(value)] = choice.get("description")
    return criteria


def _levels(raw: Mapping[str, Any], path: tuple[str | int, ...], findings: Findings) -> list[Any]:
    levels = []
    for level in _entries(raw, "levels", path, findings):
        label, description = level.get("label"), level.get("description")
        if not isinstance(label, str):
            findings.add(
                "invalid_question", (*path, "levels"), f"has a label {shown(label)}; a label is text"
            )
            continue
        levels.append(f"{label}: {description}" if description else label)
    return levels


def _entries(
    raw: Mapping[str, Any], field: str, path: tuple[str | int, ...], findings: Findings
) -> Sequence[Mapping[str, Any]]:
    entries = raw.get(field)
    if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
        return entries
    findings.add("invalid_question", (*path, field), f"must be a list of objects, not {shown(entries)}")
    return ()


def option_name(value: str | bool) -> str:
    """The text of a choice's value; true and false are values of their own on the wire, words in the prompt."""
    return value if isinstance(value, str) else json.dumps(value)


def _text(instructions: Any) -> Any:
    """A list of text and JSON parts as one text; anything else as it is."""
    if not isinstance(instructions, list):
        return instructions
    return "\n".join(
        part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str)
        else json.dumps(part.get("data", part) if isinstance(part, dict) else part, ensure_ascii=False)
        for part in instructions
    )  # fmt: skip


@dataclass(frozen=True)
class AnswerName:
    """What an answer is called on this wire: its question's name, and its options by what System One calls them."""

    name: str | None
    options: Mapping[str, str | bool]


AnswerNames = tuple[AnswerName, ...]


def answer_names(payload: Mapping[str, Any]) -> AnswerNames:
    """The names in a body that `to_system_one` has taken."""
    return tuple(AnswerName(question.get("name"), _options(question)) for question in payload["questions"])


def _options(question: Mapping[str, Any]) -> dict[str, str | bool]:
    if question["type"] == "choice":
        return {option_name(choice["value"]): choice["value"] for choice in question["choices"]}
    levels = question["levels"] if question["type"] == "score" else ()
    return {str(place): level["label"] for place, level in enumerate(levels)}


def from_system_one(names: AnswerNames, response: Mapping[str, Any], job_id: str) -> dict[str, Any]:
    """The response in OpenAI's terms: answers in the order of the questions, a failed one as a refusal."""
    usage = response["usage"]
    return {
        "id": job_id,
        "object": "decision",
        "model": response["model"],
        "answers": [
            {"name": asked.name, **_answer(asked.options, response["answers"][str(place)])}
            for place, asked in enumerate(names)
        ],
        "usage": {
            "input_tokens": usage["input_tokens"],
            "input_tokens_details": {
                "cached_tokens": max(0, usage["input_tokens"] - usage["computed_tokens"]),
                "cache_write_tokens": 0,
            },
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["input_tokens"],
        },
    }


def _answer(options: Mapping[str, str | bool], answer: Mapping[str, Any]) -> dict[str, Any]:
    match answer["type"]:
        case "noul":
            return {"type": "predicate", "probability": answer["noul"]}
        case "choice":
            return {
                "type": "choice",
                "choice": options[answer["choice"]],
                "probabilities": [
                    {"value": options[name], "probability": p} for name, p in answer["probabilities"].items()
                ],
                "confidence": answer["confidence"],
            }
        case "score":
            return {
                "type": "score",
                "score": answer["score"],
                "probabilities": [
                    {"value": int(level), "label": options[level], "probability": p}
                    for level, p in answer["probabilities"].items()
                ],
                "confidence": answer["confidence"],
            }
        case _:
            return {"type": "refusal"}
