"""OpenAI's decisions dialect in terms of System One: `input` is a state, a predicate is a noul. Pure.

Media are refused. A list of messages stays the list that it is: the model reads it as JSON text.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from d3serve.api import bounds
from d3serve.api.media_parts import media_parts
from d3serve.api.openai_models import ChoiceAsked, OpenAIDecisionRequest, QuestionAsked, ScoreAsked
from d3serve.api.validation import MAX_FIELDS, Findings, Path, check_request, finding_of
from d3serve.errors import InvalidRequest
from d3serve.schemas import DecisionRequest
from d3serve.settings import Settings
from d3serve.text.wording import TOLD, shown

_ENTRIES: Final = ("choices", "levels")
_ASKED: Final = TypeAdapter(OpenAIDecisionRequest)


def is_openai(payload: Mapping[str, Any]) -> bool:
    """Whether a body speaks this dialect; System One's says `state`."""
    return "input" in payload and "state" not in payload


def to_system_one(payload: Mapping[str, Any], settings: Settings) -> DecisionRequest:
    """The request in System One's terms; its questions are named by their places, `0`, `1` and so on.

    Raises:
        InvalidRequest: or a subclass, as `check_request` does.
    """
    findings = Findings()
    _check_sizes(payload, findings)
    findings.raise_if_any()
    _check_media(payload, findings)
    asked = _validated(payload, findings)
    findings.raise_if_any()
    if asked is None:
        raise InvalidRequest("the body is not valid")
    questions = {
        str(place): _system_one(question, ("questions", place), findings)
        for place, question in enumerate(asked.questions)
    }
    findings.raise_if_any()
    return check_request({"model": asked.model, "state": asked.input, "questions": questions}, settings)


def _check_sizes(payload: Mapping[str, Any], findings: Findings) -> None:
    """Bound what pydantic may report on."""
    questions = payload.get("questions")
    if isinstance(questions, list) and len(questions) > (most := bounds.MAX_QUESTIONS):
        told = f"holds {len(questions)} questions; a job may hold {most}"
        findings.add("too_many_questions", ("questions",), told)
        return
    for path, named in _named_objects(payload):
        if len(named) > MAX_FIELDS:
            code = "invalid_question" if path else "invalid_request"
            findings.add(code, path, f"holds {len(named)} fields, more than any object here has")


def _named_objects(payload: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The objects that have fields of ours: the request, its questions, their choices and levels."""
    yield (), payload
    for path, question in _questions(payload):
        yield path, question
        for field in _ENTRIES:
            entries = question.get(field)
            for place, entry in enumerate(entries if isinstance(entries, list) else ()):
                if isinstance(entry, dict):
                    yield (*path, field, place), entry


def _questions(payload: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    questions = payload.get("questions")
    for place, question in enumerate(questions if isinstance(questions, list) else ()):
        if isinstance(question, dict):
            yield ("questions", place), question


def _check_media(payload: Mapping[str, Any], findings: Findings) -> None:
    for told in media_parts(payload["input"], messages=True):
        findings.add("unsupported_modality", ("input",), told)
    for path, question in _questions(payload):
        for told in media_parts(question.get("instructions"), messages=True):
            findings.add("unsupported_modality", path, told)


def _validated(payload: Mapping[str, Any], findings: Findings) -> OpenAIDecisionRequest | None:
    try:
        return OpenAIDecisionRequest.model_validate(payload)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            findings.add(*_finding(one))
        return None


def _finding(error: ErrorDetails) -> tuple[str, Path, str]:
    """One pydantic error in our words, at the place that the client wrote."""
    match error["loc"]:
        case ("questions", int() as place):  # no question at all, or of no type that there is
            found = error["input"].get("type") if isinstance(error["input"], dict) else error["input"]
            told = f"must be a predicate, a choice or a score, not {shown(found)}"
            return "invalid_question", ("questions", place), told
        case ("questions", int() as place, _, *rest):  # pydantic names the type here
            if error["type"] == TOLD and rest[0] in _ENTRIES:
                rest = rest[:1]
            return finding_of(error, ("questions", place, *rest), "invalid_question", _ASKED)
        case (str() as name,) if error["type"] == "extra_forbidden":
            known = ", ".join(OpenAIDecisionRequest.model_fields)
            return "invalid_request", (name,), f"is not a field of a request; there are {known}"
        case path:
            return finding_of(error, path, "invalid_request", _ASKED)


def _system_one(asked: QuestionAsked, path: Path, findings: Findings) -> dict[str, Any]:
    """A question in System One's terms."""
    instructions = _text(asked.instructions)
    match asked:
        case ChoiceAsked():
            criteria: dict[str, str | None] = {}
            for choice in asked.choices:
                name = option_name(choice.value)
                if name in criteria:
                    told = f"has two options that both read {shown(name)}"
                    findings.add("invalid_question", (*path, "choices"), told)
                criteria[name] = choice.description
            return {"type": "choice", "instructions": instructions, "criteria": criteria}
        case ScoreAsked():
            levels = [
                f"{level.label}: {level.description}" if level.description else level.label
                for level in asked.levels
            ]
            return {"type": "score", "instructions": instructions, "criteria": levels}
        case _:
            return {"type": "noul", "instructions": instructions}


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
