"""The names of the fields that an object of a request may have, by the place of one that it may not."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter

Form = dict[str, Any]  # a part of a JSON schema


def known_fields(adapter: TypeAdapter[Any], where: Sequence[str | int]) -> list[str]:
    """The fields of the object that holds `where`, a place as pydantic tells it: names, numbers and tags of unions."""
    root = _schema(adapter)
    forms = [root]
    for part in where[:-1]:
        inner = [below for form in forms for one in _readings(form, root) for below in _below(one, part)]
        forms = inner or forms  # else `part` is what pydantic calls one reading of a union
    names = [name for form in forms for one in _readings(form, root) for name in one.get("properties", ())]
    return list(dict.fromkeys(names))


@cache
def _schema(adapter: TypeAdapter[Any]) -> Form:
    return adapter.json_schema()


def _readings(form: Form, root: Form) -> Iterator[Form]:
    """A form with its reference followed, and each of those that it may be instead."""
    if "$ref" in form:
        yield from _readings(root["$defs"][form["$ref"].rpartition("/")[2]], root)
        return
    yield form
    for one in (*form.get("anyOf", ()), *form.get("oneOf", ())):
        yield from _readings(one, root)


def _below(form: Form, part: str | int) -> Iterator[Form]:
    tags = form.get("discriminator", {}).get("mapping", {})
    if part in tags:
        yield {"$ref": tags[part]}
    elif isinstance(part, int) and "items" in form:
        yield form["items"]
    elif part in form.get("properties", {}):
        yield form["properties"][part]
