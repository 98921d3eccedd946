"""What a request must be beyond JSON: fields, kinds, counts, and options that a model can tell apart.

Everything wrong is collected (ten findings at most) and raised as one error, so that a client mends its
request in one go. A finding names the question, the value and the limit, and never echoes more than a
few words of the input.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from d3serve import errors
from d3serve.api import bounds
from d3serve.api.known_fields import known_fields
from d3serve.api.media_parts import media_parts
from d3serve.api.problems import MAX_PROBLEMS
from d3serve.api.token_bounds import size_of, surely_within
from d3serve.schemas import DecisionRequest, JobOptions
from d3serve.schemas.questions import KINDS, LIMITS, Kind, Question, value_text
from d3serve.settings import Settings
from d3serve.text.wording import complaint, shown

T = TypeVar("T")
Path = tuple[str | int, ...]

MEDIA_QUESTION_TYPES: Final = ("box", "track")
MEDIA_FIELDS: Final = ("audio",)  # images, videos and assets have been taken out before
REQUEST_FIELDS: Final = ("model", "state", "questions", "job")
MAX_FIELD_CHARS: Final = 120
MAX_MODEL_CHARS: Final = 256  # a Hub id has at most 96 and a revision 40, a folder's name 255
MAX_MARKS: Final = 30  # on one letter, as in UAX #15; to order longer runs takes quadratic time
MAX_FIELDS: Final = 64  # of an object of ours: pydantic would report on every one of a million

_QUESTION: Final[TypeAdapter[Question]] = TypeAdapter(Question)
_JOB: Final = TypeAdapter(JobOptions)
_WRONG_FORMS: Final = frozenset({"dict_type", "model_type", "list_type"})
_ERRORS: Final[Mapping[str, type[errors.InvalidRequest]]] = {
    cls.code: cls
    for cls in (
        errors.InvalidRequest,
        errors.InvalidQuestion,
        errors.TooManyQuestions,
        errors.TooManyOptions,
        errors.MaxTokensExceeded,
        errors.UnsupportedModality,
        errors.InvalidMedia,
    )
}


class Findings:
    """What is wrong with a request, in the order found; full at ten."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Path, str]] = []

    def add(self, code: str, path: Path, detail: str) -> None:
        """Note that the value at `path` is wrong; `detail` is a clause about it."""
        if not self.full:
            self._found.append((code, path, detail))

    @property
    def full(self) -> bool:
        """Whether more findings would be thrown away."""
        return len(self._found) >= MAX_PROBLEMS

    def raise_if_any(self) -> None:
        """Raise the first finding as an error that lists all of them.

        Raises:
            InvalidRequest: or the subclass that belongs to the first finding's code.

        """
        if not self._found:
            return
        code, path, detail = self._found[0]
        message = f"{dotted(path)} {detail}" if path else detail
        if len(self._found) > 1:
            more = "and more" if self.full else f"and {len(self._found) - 1} more"
            message = f"{message} ({more}, see errors)"
        listed = [
            {"pointer": pointer(where), "code": which, "detail": what} for which, where, what in self._found
        ]
        raise _ERRORS[code](message, field=dotted(path) or None, details={"errors": listed})


def check_request(payload: Mapping[str, Any], settings: Settings) -> DecisionRequest:
    """A System One body, checked in every way that needs no tokenizer.

    Raises:
        InvalidRequest: or a subclass; `details["errors"]` lists up to ten findings.
    """
    findings = Findings()
    _check_fields(payload, findings)
    _check_model(payload.get("model", ""), findings)
    if "state" not in payload:
        findings.add("invalid_request", ("state",), "is required")
    elif not isinstance(payload["state"], str | dict | list):
        found = shown(payload["state"])
        findings.add("invalid_request", ("state",), f"must be a string, an object or a list, not {found}")
    questions = _check_questions(payload.get("questions"), findings)
    for told in media_parts(payload.get("state")):
        findings.add("unsupported_modality", ("state",), told)
    job = check_job(payload.get("job", {}), findings)
    if (job.result_ttl_s or 0) > settings.max_result_ttl_s:
        told = f"must be at most {settings.max_result_ttl_s} here, not {job.result_ttl_s}"
        findings.add("invalid_request", ("job", "result_ttl_s"), told)
    findings.raise_if_any()
    _check_lengths(payload["state"], questions, job, settings, findings)
    findings.raise_if_any()
    # Every part is checked by now, and the state is JSON by reading: no need to walk it again.
    return DecisionRequest.model_construct(
        model=payload["model"], state=payload["state"], questions=questions, job=job
    )


def _check_lengths(
    state: Any, questions: Mapping[str, Question], job: JobOptions, settings: Settings, findings: Findings
) -> None:
    """Refuse what no tokenizer can make fit; all else is counted by a worker, which refuses with the same code."""
    interactive = job.lane == "interactive"
    prompt_limit = settings.max_interactive_tokens if interactive else settings.max_offline_tokens
    job_limit = settings.max_job_tokens_interactive if interactive else settings.max_job_tokens_offline
    state_text = value_text(state)
    asked_texts = {name: (value_text(q.instructions or ""), *q.options()) for name, q in questions.items()}
    if surely_within(min(prompt_limit, job_limit), state_text, *chain.from_iterable(asked_texts.values())):
        return
    read_once = size_of(state_text)
    if read_once.least_tokens > prompt_limit:
        told = f"holds {read_once}, past the maximum context length of {prompt_limit} tokens; nothing is truncated"
        findings.add("max_tokens_exceeded", ("state",), told)
        return
    whole = read_once
    for name, texts in asked_texts.items():
        asked = size_of(*texts)
        whole += asked
        if (read_once + asked).least_tokens > prompt_limit:
            told = f"holds {asked} beside the state, past the maximum context length of {prompt_limit} tokens"
            findings.add("max_tokens_exceeded", ("questions", name), told)
    if whole.least_tokens > job_limit:
        lane = "interactive" if interactive else "offline"
        told = (
            f"come to {whole} with the state; a job of the lane {lane} may have {job_limit} tokens: split it"
        )
        findings.add("max_tokens_exceeded", ("questions",), told)


def check_job(value: Any, findings: Findings) -> JobOptions:
    """The `job` object of a submission; on a finding, the defaults stand in."""
    job = _validated(_JOB, value, ("job",), findings, "invalid_request")
    return job if job is not None else JobOptions()


def check_body(adapter: TypeAdapter[T], payload: Mapping[str, Any]) -> T:
    """A body of another kind, by its pydantic type.

    Raises:
        InvalidRequest: `details["errors"]` lists what is wrong.
    """
    findings = Findings()
    value = _validated(adapter, payload, (), findings, "invalid_request")
    findings.raise_if_any()
    if value is None:
        raise errors.InvalidRequest("the body is not valid")
    return value


def _check_fields(payload: Mapping[str, Any], findings: Findings) -> None:
    for name in payload:
        if findings.full:
            return
        if name in MEDIA_FIELDS:
            findings.add("unsupported_modality", (name,), "is not supported: states show images and videos")
        elif name not in REQUEST_FIELDS:
            findings.add(
                "invalid_request",
                (name,),
                f"is not a field of a request; there are {', '.join(REQUEST_FIELDS)}",
            )


def _check_model(model: Any, findings: Findings) -> None:
    if not isinstance(model, str) or not model.strip():
        found = f", not {shown(model)}" if model != "" else ""
        findings.add("invalid_request", ("model",), f"must name a model{found}")
    elif len(model) > MAX_MODEL_CHARS:
        told = f"has {len(model)} characters; there may be at most {MAX_MODEL_CHARS}"
        findings.add("invalid_request", ("model",), told)


def _check_questions(value: Any, findings: Findings) -> dict[str, Question]:
    if not isinstance(value, dict) or not value:
        found = shown(value) if value is not None else "missing or null"
        findings.add(
            "invalid_request", ("questions",), f"must be an object with at least one question, not {found}"
        )
        return {}
    if len(value) > bounds.MAX_QUESTIONS:
        findings.add(
            "too_many_questions",
            ("questions",),
            f"holds {len(value)} questions; a job may hold {bounds.MAX_QUESTIONS}",
        )
        return {}
    checked: dict[str, Question] = {}
    for name, raw in value.items():
        if findings.full:
            break
        if not name or len(name) > bounds.MAX_QUESTION_ID_CHARS:
            findings.add(
                "invalid_question",
                ("questions", name),
                f"has an id of {len(name)} characters; an id has 1 to {bounds.MAX_QUESTION_ID_CHARS}",
            )
            continue
        question = _check_question(raw, ("questions", name), findings)
        if question is not None:
            checked[name] = question
    return checked


def _check_question(raw: Any, path: Path, findings: Findings) -> Question | None:
    if not isinstance(raw, dict):
        findings.add("invalid_question", path, f"must be an object, not {shown(raw)}")
        return None
    kind = raw.get("type")
    supported = f"there are {', '.join(KINDS)}"
    if isinstance(kind, str) and kind in MEDIA_QUESTION_TYPES:
        findings.add(
            "unsupported_modality", (*path, "type"), f'"{kind}" needs an image or a video; {supported}'
        )
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        found = "is required" if "type" not in raw else f"{shown(kind)} is unknown"
        findings.add("invalid_question", (*path, "type"), f"{found}; {supported}")
        return None
    question = _validated(_QUESTION, raw, path, findings, "invalid_question")
    for told in media_parts(raw.get("instructions")):
        findings.add("unsupported_modality", (*path, "instructions"), told)
    for told in media_parts(raw.get("criteria")):
        findings.add("unsupported_modality", (*path, "criteria"), told)
    if question is not None:
        _check_meaning(question, path, findings)
    return question


def _check_meaning(question: Question, path: Path, findings: Findings) -> None:
    """Refuse a question whose options a model could not tell apart, or that asks nothing."""
    for fault in question.faults():
        findings.add("invalid_question", (*path, *fault.path), fault.told)
    repeated = _first_repeated(question.options())
    if repeated is not None:
        findings.add(
            "invalid_question", (*path, "criteria"), f"has two options that both read {shown(repeated)}"
        )


def _first_repeated(texts: Iterable[str]) -> str | None:
    """The first text that stood before; composed and decomposed accents are one, as for the tokenizer."""
    seen: set[str] = set()
    for text in texts:
        normal = _composed(text)
        if normal in seen:
            return text
        seen.add(normal)
    return None


def _composed(text: str) -> str:
    """NFC, save for a text with more marks on one letter than any language writes: that stays as it is."""
    if text.isascii() or unicodedata.is_normalized("NFC", text) or _many_marks().search(text):
        return text
    return unicodedata.normalize("NFC", text)


@cache
def _many_marks() -> re.Pattern[str]:
    """More than MAX_MARKS marks in a row. A regular expression reads 50 million characters a second, a loop two."""
    marks = "".join(chr(code) for code in range(0x300, 0x20000) if unicodedata.combining(chr(code)))
    return re.compile(f"[{marks}]{{{MAX_MARKS + 1}}}")


def _validated(adapter: TypeAdapter[T], value: Any, path: Path, findings: Findings, code: str) -> T | None:
    for where, named in _named_objects(value):
        if len(named) > MAX_FIELDS:
            findings.add(code, (*path, *where), f"holds {len(named)} fields, more than any object here has")
            return None
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            where = tuple(part for index, part in enumerate(one["loc"]) if not (index == 0 and part in KINDS))
            findings.add(*finding_of(one, (*path, *where), code, adapter, _kind_of(value)))
        return None


def _named_objects(value: Any) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """`value` and what it holds directly, as far as these are objects with a handful of fields each."""
    if not isinstance(value, dict):
        return
    yield (), value
    kind = _kind_of(value)
    for name, part in value.items():
        if isinstance(part, dict) and (kind is None or name not in kind.own_keys):
            yield (name,), part


def _kind_of(value: Any) -> type[Kind] | None:
    """The kind of a question; None for what is none."""
    named = value.get("type") if isinstance(value, dict) else None
    return KINDS.get(named) if isinstance(named, str) else None


def finding_of(
    error: ErrorDetails,
    path: Path,
    code: str,
    adapter: TypeAdapter[Any],
    kind_asked: type[Kind] | None = None,
) -> tuple[str, Path, str]:
    """One error of `adapter` about the value at `path`, in our words: code, place and clause."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return code, path, f"is not a field here; there are {', '.join(known_fields(adapter, error['loc']))}"
    if kind == "missing":
        return code, path, "is required"
    if kind_asked and kind in ("too_long", "too_short") and path[-1] == "criteria":
        allowed = f"{LIMITS[kind_asked.limit]} {kind_asked.limit.replace('_', ' ')}"
        code = "too_many_options" if kind == "too_long" else code
        return code, path, f"holds {len(error['input'])}; there may be 2 to {allowed}"
    if kind in ("too_long", "too_short"):
        bound = (
            f"at most {context['max_length']}" if kind == "too_long" else f"at least {context['min_length']}"
        )
        return code, path, f"holds {len(error['input'])} entries; there may be {bound}"
    if path[-1] == "[key]" and path[-2] == error["input"]:  # pydantic's name for a key, below the key itself
        return code, path[:-2], f"has a key {shown(error['input'])}, which {complaint(error)}"
    as_criteria = kind_asked if kind in _WRONG_FORMS and path[-1] == "criteria" else None
    form = f"; of a {error['loc'][0]} it is as {as_criteria.form}" if as_criteria else ""
    return code, path, complaint(error) + form


def pointer(path: Path) -> str:
    """`path` as an RFC 6901 JSON pointer, cut at 120 characters a step."""
    return "".join("/" + _clipped(part).replace("~", "~0").replace("/", "~1") for part in path)


def dotted(path: Path) -> str:
    """`path` for people and for `field`: `questions.spam.criteria`."""
    return ".".join(_clipped(part) for part in path)


def _clipped(part: str | int) -> str:
    text = str(part)
    return text if len(text) <= MAX_FIELD_CHARS else text[: MAX_FIELD_CHARS - 1] + "…"
