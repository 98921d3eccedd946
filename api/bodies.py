"""From an HTTP request to the JSON object in it, with every way a body can be too much closed off."""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import zstandard
from starlette.requests import Request

from d3serve.api import bounds
from d3serve.api.budget import BodyBytes
from d3serve.api.multipart import boundary_of
from d3serve.errors import (
    BodyTooLarge,
    InvalidJSON,
    InvalidRequest,
    UnsupportedEncoding,
    UnsupportedMediaType,
)
from d3serve.settings import Settings
from d3serve.text.strict_json import read_json
from d3serve.text.wording import shown

MAX_RATIO: Final = 200  # JSON compresses 3 to 30 times; a bomb, 1,000 times and more
RATIO_FREE_BYTES: Final = 2**20  # below this the ratio is nobody's concern
MAX_GZIP_MEMBERS: Final = 16  # a client writes one; each costs a copy of what is left
ZSTD_MAX_WINDOW_BYTES: Final = 8 * 2**20  # RFC 9659: the window a zstd content coding may use
PIECE_BYTES: Final = 2**20  # decoded at a time, so that a body is refused before it is there
INLINE_BYTES: Final = 64 * 2**10  # what the event loop reads and checks itself: about 10 ms at the worst
JSON_TYPES: Final = ("application/json", "text/json")


@dataclass(frozen=True)
class Body:
    """A decoded body; `boundary` stands between its parts, None: it is JSON, all of it."""

    data: bytes
    boundary: bytes | None = None


async def read_submission(request: Request, settings: Settings) -> Body:
    """The decoded body of a submission, which may be in parts. Raises like `read_body`."""
    header, from_page = request.headers.get("content-type"), "origin" in request.headers
    boundary = boundary_of(header)
    if boundary is None:
        check_media_type(header, from_page=from_page)
    elif from_page:  # no browser asks before it posts a form
        raise UnsupportedMediaType("a web page must send application/json, with images as data URLs")
    return Body(await _read_decoded(request, settings), boundary)


async def read_object(request: Request, settings: Settings) -> dict[str, Any]:
    """The JSON object in a short body.

    Raises:
        BodyTooLarge: it is none that belongs here.
        InvalidJSON, InvalidRequest: as `read_payload`.
    and like `read_body`.
    """
    body = await read_body(request, settings)
    if len(body) > INLINE_BYTES:
        raise _too_large(INLINE_BYTES)
    return read_payload(body)


def read_payload(body: bytes) -> dict[str, Any]:
    """The JSON object in a decoded body.

    Raises:
        InvalidJSON: the body is not strict JSON.
        InvalidRequest: it is JSON, but no object.
    """
    if not body.strip():
        raise InvalidJSON("the body is empty; send a JSON object")
    value = read_json(body, max_depth=bounds.MAX_JSON_DEPTH)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {shown(value)}")
    return value


async def read_body(request: Request, settings: Settings) -> bytes:
    """The decoded body.

    Raises:
        UnsupportedMediaType, UnsupportedEncoding, BodyTooLarge: before the body is read, where headers tell.
        InvalidJSON: the body does not decode.
        Overloaded, RateLimited: this process, or this caller, holds as many bytes of bodies as it may.
    """
    check_media_type(request.headers.get("content-type"), from_page="origin" in request.headers)
    return await _read_decoded(request, settings)


async def _read_decoded(request: Request, settings: Settings) -> bytes:
    coding = content_coding(request.headers.getlist("content-encoding"))
    held: BodyBytes = request.state.body_bytes
    encoded = await _read(request, settings.max_body_bytes, held)
    if coding == "identity":
        return encoded
    if len(encoded) <= RATIO_FREE_BYTES // MAX_RATIO:  # so it is no more than that: 2 ms
        return decompress(encoded, coding, settings.max_body_bytes, held.take)
    return await asyncio.to_thread(decompress, encoded, coding, settings.max_body_bytes, held.take)


def check_media_type(header: str | None, *, from_page: bool = False) -> None:
    """Accept JSON in UTF-8, also when the header is missing: we read nothing else.

    But a web page must say so: only then does its browser ask first whether it may post to another host.

    Raises:
        UnsupportedMediaType: says what is accepted, and why multipart is not.
    """
    if header is None:
        if from_page:
            raise UnsupportedMediaType(
                "a web page must name its body's type; send content-type: application/json"
            )
        return
    media_type, *parameters = (part.strip().lower() for part in header.split(";"))
    if media_type == "multipart/form-data":
        raise UnsupportedMediaType(
            "multipart bodies carry images, which have no place here; send application/json"
        )
    if media_type not in JSON_TYPES and not media_type.endswith("+json"):
        raise UnsupportedMediaType(
            f"the content type {shown(media_type)} is not read here; send application/json"
        )
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip(' "') not in ("utf-8", "utf8", "us-ascii"):
            raise UnsupportedMediaType(f"the charset {shown(value)} is not read here; send UTF-8")


def content_coding(headers: list[str]) -> str:
    """The one coding of a body: `identity`, `gzip` or `zstd`.

    Raises:
        UnsupportedEncoding: another coding, or several on top of each other.
    """
    codings = [name.strip().lower() for header in headers for name in header.split(",")]
    codings = [name for name in codings if name not in ("", "identity")]
    if not codings:
        return "identity"
    if len(codings) > 1:
        raise UnsupportedEncoding(f"{len(codings)} content codings on one body; send at most one")
    coding = "gzip" if codings[0] == "x-gzip" else codings[0]
    if coding not in ("gzip", "zstd"):
        raise UnsupportedEncoding(
            f"the content coding {shown(coding)} is not read here; send identity, gzip or zstd"
        )
    return coding


async def _read(request: Request, limit: int, held: BodyBytes) -> bytes:
    """The body as sent; refused as soon as its header or its stream shows that it passes `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        held.take(len(part))
        parts.append(part)
    return b"".join(parts)


def decompress(encoded: bytes, coding: str, limit: int, take: Callable[[int], None]) -> bytes:
    """The decoded body; never builds more than `limit` bytes, nor past 1 MiB more than 200 times what came.

    `take` is told of each piece before the next one is made.

    Raises:
        BodyTooLarge: it would pass either bound.
        InvalidJSON: the bytes are not what `coding` says.
    and what `take` raises.
    """
    bound = min(limit, max(RATIO_FREE_BYTES, MAX_RATIO * len(encoded)))
    pieces, size = [], 0
    try:
        for piece in _gunzip(encoded) if coding == "gzip" else _unzstd(encoded):
            size += len(piece)
            if size > bound:
                raise _too_large(bound)
            take(len(piece))
            pieces.append(piece)
    except (zlib.error, zstandard.ZstdError):
        raise InvalidJSON(f"the body does not decode as {coding}") from None
    return b"".join(pieces)


def _unzstd(encoded: bytes) -> Iterator[bytes]:
    """The frames of a zstd body, in pieces.

    Raises:
        zstandard.ZstdError: not zstd, or cut off.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW_BYTES)
    with decompressor.stream_reader(encoded, read_across_frames=True) as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece


def _gunzip(encoded: bytes) -> Iterator[bytes]:
    """The members of a gzip body, in pieces.

    `gzip.GzipFile` reads headers and what lies between members byte by byte: 48 MiB of empty ones held up every other
    request for 10 s.

    Raises:
        zlib.error: not gzip, cut off, or too many members.
    """
    for _ in range(MAX_GZIP_MEMBERS):
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        while piece := member.decompress(encoded, PIECE_BYTES):
            yield piece
            encoded = member.unconsumed_tail
        if not member.eof:
            raise zlib.error("cut off")
        if not member.unused_data:
            return
        encoded = member.unused_data
    raise zlib.error("too many members")


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit:,} bytes once decoded")
