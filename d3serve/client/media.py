"""Images and videos for a request: paths, bytes or Pillow images as the data URLs that the server takes."""

import base64
import io
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from d3serve.errors import InvalidRequest
from d3serve.text.wording import shown

LISTS: Final = ("images", "videos")
# By how a file begins, as the server goes; what is none of them is for the server to refuse.
_BEGINNINGS: Final = (
    (re.compile(rb"\x89PNG"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"....ftypqt  ", re.DOTALL), "video/quicktime"),
    (re.compile(rb"....ftyp", re.DOTALL), "video/mp4"),
    (re.compile(rb"\x1a\x45\xdf\xa3.{0,60}?webm", re.DOTALL), "video/webm"),
    (re.compile(rb"\x1a\x45\xdf\xa3"), "video/x-matroska"),
)
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # one letter is a drive


class Picture(Protocol):
    """A Pillow image, as far as it is asked of."""

    def save(self, fp: io.BytesIO, format: str) -> None:  # noqa: A002 # Pillow's name
        """Write it to a file."""


Source = str | os.PathLike[str] | bytes | Picture


def media_fields(images: Iterable[Source], videos: Iterable[Source]) -> dict[str, list[str]]:
    """The fields of a request for these.

    Raises:
        InvalidRequest: a file cannot be read; `field` names it.
    """
    return {
        name: [data_url(source, f"{name}.{place}") for place, source in enumerate(sources)]
        for name, sources in zip(LISTS, (list(images), list(videos)), strict=True)
        if sources
    }


def with_files(body: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A request in which images and videos may be named by paths, as of a folder. Raises like `media_fields`."""
    named = {name: body[name] for name in LISTS if isinstance(body.get(name), list)}
    return {**body} | {
        name: [
            data_url(folder / one, f"{name}.{place}")
            if isinstance(one, str) and not _ADDRESS.match(one)
            else one
            for place, one in enumerate(sources)
        ]
        for name, sources in named.items()
    }


def data_url(source: Source, field: str) -> str:
    """One image or video as a data URL; one that is a URL stays as it is, for the server to read or refuse."""
    if isinstance(source, str) and _ADDRESS.match(source):
        return source
    data = _bytes_of(source, field)
    kind = next((name for begins, name in _BEGINNINGS if begins.match(data)), None)
    kind = kind or ("video/mp4" if field.startswith("videos") else "image/png")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _bytes_of(source: Source, field: str) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str | os.PathLike):
        try:
            return Path(source).read_bytes()
        except (OSError, ValueError) as error:
            told = getattr(error, "strerror", None) or "is no path"
            raise InvalidRequest(f"cannot read {shown(str(source), 200)}: {told}", field=field) from None
    if hasattr(source, "save"):
        file = io.BytesIO()
        source.save(file, format="PNG")
        return file.getvalue()
    raise InvalidRequest(f"is a {type(source).__name__}; give a path, bytes or a Pillow image", field=field)
