"""One JSON file of a package: read once, and asked for fields of the kinds that we expect."""

import json
import os
from pathlib import Path
from typing import Any, Self, cast

from d3serve.errors import InvalidCheckpoint

LARGEST_INTEGER = 2**31 - 1  # no size, length or id of a model comes near
LARGEST_TEXT_BYTES = 2**27  # a tokenizer.json has 7 to 20 MB, all else less
LEAST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30  # FP32 divides by these and stays finite


class Fields:
    """Typed access to one JSON file; every refusal names the file, the field and the value."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parse a file.

        Raises:
            InvalidCheckpoint: it is missing, or is no JSON object.
        """
        return cls(_read_json(path), path.name)

    @classmethod
    def read_if_there(cls, path: Path) -> Self | None:
        """The same; None for a file that is not there."""
        return cls.read(path) if path.exists() else None

    def refuse(self, name: str, expected: str) -> InvalidCheckpoint:
        """An error that names the file, the field and its value, to be raised."""
        shown = json.dumps(self.values.get(name), ensure_ascii=False, default=str)
        return InvalidCheckpoint(f"{self.source}: {name} is {shown[:200]}; {expected}", field=name)

    def integer(self, name: str, *, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= LARGEST_INTEGER:  # a bool is an int to isinstance
            raise self.refuse(name, f"expected an integer of at least {least}")
        return value

    def optional_integer(self, name: str, *, least: int) -> int | None:
        """The same; null and a missing field are None."""
        return None if self.values.get(name) is None else self.integer(name, least=least)

    def positive(self, name: str) -> float:
        """A number above 0 that FP32 can compute with."""
        value = self.values.get(name)
        if not is_positive(value):
            raise self.refuse(name, "expected a number from 1e-30 to 1e30")
        return float(cast("float", value))

    def one_of(self, name: str, *allowed: Any, default: Any = ...) -> Any:
        """One of the allowed values, of the same type; `default` stands for a missing field."""
        value = self.values.get(name, default)
        if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
            raise self.refuse(name, "expected " + " or ".join(json.dumps(each) for each in allowed))
        return value

    def list_of(self, name: str, kind: type, length: int) -> tuple[Any, ...]:
        """A list of `length` values of one type."""
        value = self.values.get(name)
        if (
            not isinstance(value, list)
            or len(value) != length
            or any(type(item) is not kind for item in value)
        ):
            raise self.refuse(name, f"expected {length} values of type {kind.__name__}")
        return tuple(value)

    def section(self, name: str) -> "Fields":
        """An object within the object."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.refuse(name, "expected an object")
        return Fields(value, f"{self.source}: {name}")


def is_positive(value: object) -> bool:
    """Whether a value is a number above 0 that FP32 can compute with."""
    return type(value) in (int, float) and LEAST_NUMBER <= cast("float", value) <= LARGEST_NUMBER


def refuse_irregular(path: Path) -> None:
    """Refuse what is there but is no file: opening a FIFO would wait for ever.

    Raises:
        InvalidCheckpoint: the message names it.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # Path's own raise where a name is long
        raise InvalidCheckpoint(f"{path.name} is no regular file", field=path.name)


def refuse_oversized(path: Path) -> None:
    """Refuse a file that is read whole and is larger than any of its kind.

    Raises:
        InvalidCheckpoint: the message has both sizes.
    """
    if os.path.isfile(path) and (size := os.path.getsize(path)) > LARGEST_TEXT_BYTES:
        raise InvalidCheckpoint(
            f"{path.name} has {size} bytes; {LARGEST_TEXT_BYTES} are allowed", field=path.name
        )


def _read_json(path: Path) -> dict[str, Any]:
    refuse_irregular(path)
    refuse_oversized(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(
            values, ensure_ascii=False
        ).encode()  # JSON can spell half a character; no name or text may be one
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{path.name} is missing from {path.parent}", field=path.name) from None
    except (ValueError, RecursionError, OSError) as error:
        raise InvalidCheckpoint(f"{path.name} cannot be read: {error}", field=path.name) from None
    if not isinstance(values, dict):
        raise InvalidCheckpoint(f"{path.name} is no JSON object", field=path.name)
    return values
