"""JSON as a decision service must read it: nothing lost, nothing guessed, nothing that cannot be rewritten.

Python's reader lets pass what breaks later: NaN and 1e999 (no JSON writer may emit them), a key given twice
(one question silently gone), half a surrogate pair (no UTF-8 for it), nesting that ends in a RecursionError.
What it reads right, it keeps: key order, integers of any usual length, floats by their shortest text. So the
state that a worker renders is the state that was sent.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

from d3serve.errors import DuplicateKey, InvalidJSON
from d3serve.text.wording import shown

# A prompt of 131,072 tokens cannot hold more; 48 MiB of `{},` would cost gigabytes as Python objects.
MAX_VALUES = 262_144

# Few texts have more beside their strings: to look at those alone takes a twentieth of the time of counting in all.
FEW_BYTES = 16 * 2**10

# Twice what an RSA key needs. Converting takes quadratic time: 48 MiB of integers of 4,300 digits took 8 s.
MAX_DIGITS = 1_234
BACKSLASH = ord("\\")

# A string, closed or running to the end of the body. Possessive, hence linear whatever the body holds.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(body: bytes, *, max_depth: int) -> Any:
    """The value in `body`, UTF-8 JSON by RFC 8259 with the ambiguous parts refused.

    Raises:
        DuplicateKey: an object holds a key twice.
        InvalidJSON: anything else that is not strict JSON; the message says what and where.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJSON(f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from None
    if text.startswith("\ufeff"):
        raise InvalidJSON("the body begins with a byte order mark; send plain UTF-8")
    _check_size(body)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_short_int,
            parse_float=_finite_float,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as error:
        raise InvalidJSON(
            f"the body is not JSON: {error.msg.removesuffix(' at')} at line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:  # the parser counts its own depth, and stops long before the stack ends
        raise InvalidJSON(f"the body nests deeper than {max_depth} levels") from None
    _check_depth(value, max_depth)
    if b"\\" in body and _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(value)
    return value


def _check_size(body: bytes) -> None:
    """Bound the number of values before the parser builds any."""
    if len(body) < MAX_VALUES or is_short_beside_strings(body, FEW_BYTES) or _values(body) < MAX_VALUES:
        return
    if _values(_STRING.sub(b"", body)) >= MAX_VALUES:
        raise InvalidJSON(f"the body holds more than {MAX_VALUES:,} values")


def is_short_beside_strings(body: bytes, most_bytes: int) -> bool:
    """Whether JSON text has at most so many bytes that are quotes or in no string; so it has no more values.

    Looks from quote to quote: `find` reads some gigabytes a second, counting and regular expressions one at most.
    """
    beside = end = 0
    inside = False
    while beside <= most_bytes:
        quote = body.find(b'"', end)
        if quote < 0:
            return inside or beside + len(body) - end <= most_bytes
        beside += 1 if inside else quote - end + 1
        inside = not inside or _is_escaped(body, end, quote)
        end = quote + 1
    return False


def _is_escaped(body: bytes, start: int, place: int) -> bool:
    """Whether the byte at a place in a string, which starts there, follows a backslash that is not escaped itself."""
    before = body[start:place] if body[place - 1] == BACKSLASH else b""
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _values(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _check_depth(value: Any, max_depth: int) -> None:
    """Level by level, so that no value, however deep, needs a deep stack."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(max_depth):
        if not level:
            return
        inner = itertools.chain.from_iterable(
            part.values() if isinstance(part, dict) else part for part in level
        )
        level = [part for part in inner if isinstance(part, dict | list)]
    if level:
        raise InvalidJSON(f"the body nests deeper than {max_depth} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key, count in counts.items() if count > 1)
        raise DuplicateKey(f"the key {shown(key)} stands twice in one object; the first value would be lost")
    return found


def _short_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise InvalidJSON(f"the body holds an integer with more digits than can be read: {len(text)}")
    return int(text)


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidJSON(f"the number {shown(text)} is too large for a float")
    return number


def _refuse_constant(text: str) -> NoReturn:
    raise InvalidJSON(f"{text} is not JSON")


def _refuse_lone_surrogates(value: Any) -> None:
    for path, text in _strings(value):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise InvalidJSON(f"a string in {path} holds \\u{code:04x}, half of a surrogate pair") from None


def _strings(value: Any) -> Iterator[tuple[str, str]]:
    """Every string of `value`, keys included, with the name of the top-level field that it stands in."""
    stack = [("the body", value)]
    if isinstance(value, dict):
        stack = [(shown(key), part) for key, part in value.items()]
        yield from (("the body", key) for key in value)
    while stack:
        path, part = stack.pop()
        if isinstance(part, str):
            yield path, part
        elif isinstance(part, dict):
            yield from ((path, key) for key in part)
            stack += ((path, inner) for inner in part.values())
        elif isinstance(part, list):
            stack += ((path, inner) for inner in part)
