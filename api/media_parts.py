"""Finds the parts of a request that are pictures, recordings or files: what cannot be read must not pass for text."""

from collections.abc import Iterator
from typing import Any, Final

from d3serve.text.wording import shown

_FORMS: Final = ("{}", "{}_url", "{}_file", "{}_data", "input_{}", "output_{}")
TYPES: Final = frozenset(form.format(kind) for kind in ("image", "video", "audio", "file") for form in _FORMS)
MESSAGE_TYPES: Final = TYPES | {"document", "media", "inline_data", "computer_screenshot", "input_screenshot"}
# What holds the medium, and what may stand beside it. A record of some table that says "type": "video" says more.
CARRIERS: Final = TYPES | {
    "url", "uri", "source", "data", "base64", "b64_json", "data_base64", "bytes", "part", "file_id", "frames",
}  # fmt: skip
BESIDE: Final = frozenset({
    "type", "detail", "format", "mime_type", "media_type", "mimeType", "filename", "name", "size", "quality", "fps",
    "min_pixels", "max_pixels", "width", "height", "transcript", "alt", "cache_control",
})  # fmt: skip
MAX_STEPS: Final = 8
_Place = tuple[Any, str | int] | None  # the place around it, and the step from there


def media_parts(value: Any, *, messages: bool = False) -> Iterator[str]:
    """What stands where in `value` that is a medium, as clauses about `value`.

    Among the contents of messages (OpenAI's dialect) a type tells; anywhere else what there is beside it must tell too.
    """
    stack: list[tuple[_Place, Any, bool]] = [(None, value, messages)]
    while stack:
        place, part, in_message = stack.pop()
        if isinstance(part, list):
            inner = [((place, index), one, in_message) for index, one in enumerate(part) if _holds(one)]
        elif not isinstance(part, dict):
            continue
        elif _is_medium(part, in_message=in_message):
            yield f"holds {_told(place)}a part of type {shown(part['type'])}: this server reads text and JSON only"
            continue
        else:
            inner = [
                ((place, name), one, messages and name in ("content", "output"))
                for name, one in part.items()
                if _holds(one)
            ]
        stack += reversed(inner)


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)


def _told(place: _Place) -> str:
    """Where that is, as a JSON pointer of a few steps."""
    steps: list[str] = []
    while place is not None and len(steps) < MAX_STEPS:
        place, step = place
        steps.append(shown(step).strip('"'))
    return f"at /{'/'.join(reversed(steps))} " if steps else ""


def _is_medium(part: dict[str, Any], *, in_message: bool) -> bool:
    kind = part.get("type")
    if not isinstance(kind, str):
        return False
    if in_message:
        return kind in MESSAGE_TYPES
    others = part.keys() - BESIDE
    return kind in TYPES and bool(others) and others <= CARRIERS
