import contextlib
import gzip
import json
import time
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from starlette.requests import Request

from d3serve.api import bodies
from d3serve.api.bodies import MAX_RATIO, check_media_type, content_coding, read_body, read_payload
from d3serve.api.budget import BodyBudget, BodyBytes
from d3serve.errors import (
    BodyTooLarge,
    InvalidJSON,
    InvalidRequest,
    RequestError,
    UnsupportedEncoding,
    UnsupportedMediaType,
)
from d3serve.settings import Settings

MIB = 2**20
SETTINGS = Settings(max_body_bytes=4 * MIB)
CODERS = {"gzip": gzip.compress, "zstd": zstandard.compress}


def request_of(parts, **headers):
    """A request whose body arrives in `parts`; `parts.taken` tells how many were pulled."""
    queue = list(parts)
    sent = {"taken": 0}

    async def receive():
        sent["taken"] += 1
        return {"type": "http.request", "body": queue.pop(0), "more_body": bool(queue)}

    names = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    state = {"body_bytes": BodyBytes(BodyBudget(100 * MIB), "somebody")}
    return Request({"type": "http", "method": "POST", "headers": names, "state": state}, receive), sent


def decompress(encoded, coding, limit):
    return bodies.decompress(encoded, coding, limit, lambda _: None)


async def read(body, **headers):
    request, _ = request_of([body], **headers)
    return read_payload(await read_body(request, SETTINGS))


@pytest.mark.anyio
@pytest.mark.parametrize("coding", ["gzip", "zstd", "x-gzip", "GZIP"])
async def test_compressed_bodies_are_read(coding):
    encode = CODERS["zstd" if coding == "zstd" else "gzip"]
    value = {"state": "hello " * 5000}
    assert await read(encode(json.dumps(value).encode()), content_encoding=coding) == value


@pytest.mark.anyio
async def test_large_compressed_bodies_are_read_off_the_loop():
    value = {"state": [str(i * 7919) for i in range(100_000)]}
    body = gzip.compress(json.dumps(value).encode(), 1)
    assert len(body) > 256 * 2**10 // 16
    assert await read(body, content_encoding="gzip") == value


@pytest.mark.parametrize("coding", CODERS)
def test_several_members_are_one_body(coding):
    encode = CODERS[coding]
    assert decompress(encode(b'{"a":') + encode(b"1}"), coding, MIB) == b'{"a":1}'


@pytest.mark.parametrize(
    "body",
    [
        gzip.compress(b"{}") + gzip.compress(b"") * 100_000,
        gzip.compress(b"{}") + b"\0" * 10 * MIB,
        b"\x1f\x8b\x08\x08" + b"\0" * 6 + b"name" * 4 * MIB,
    ],
    ids=["members", "padding", "a name"],
)
def test_a_large_body_with_nothing_in_it_costs_little(body):
    """Read byte by byte in Python, each of these took about a second of everybody's time."""
    began = time.process_time()
    with pytest.raises(InvalidJSON):
        decompress(body, "gzip", 48 * MIB)
    assert time.process_time() - began < 0.3


@pytest.mark.parametrize("coding", CODERS)
def test_a_bomb_is_refused_without_being_built(coding):
    bomb = CODERS[coding](b" " * (64 * MIB))
    assert len(bomb) < 100_000
    tracemalloc.start()
    with pytest.raises(BodyTooLarge):
        decompress(bomb, coding, 48 * MIB)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * max(MIB, MAX_RATIO * len(bomb))  # the bound, and what growing a buffer to it takes


@pytest.mark.parametrize("coding", CODERS)
def test_the_decoded_limit_holds_exactly(coding):
    encode = CODERS[coding]
    assert len(decompress(encode(b"a" * MIB), coding, MIB)) == MIB
    with pytest.raises(BodyTooLarge, match="1,048,576 bytes"):
        decompress(encode(b"a" * (MIB + 1)), coding, MIB)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "coding"),
    [
        (b"not gzip at all", "gzip"),
        (gzip.compress(b'{"a":1}', mtime=0)[:-9], "gzip"),
        (gzip.compress(b'{"a":1}', mtime=0)[:-8] + b"\0" * 8, "gzip"),
        (zlib.compress(b"{}"), "gzip"),
        (b"not zstd at all", "zstd"),
        (zstandard.compress(json.dumps({"a": list(range(1000))}).encode())[:-5], "zstd"),
        (gzip.compress(b"{}", mtime=0), "zstd"),
        (b"", "gzip"),
        (b"", "zstd"),
    ],
)
async def test_a_body_that_does_not_decode_is_a_client_error(body, coding):
    with pytest.raises(InvalidJSON):
        await read(body, content_encoding=coding)


def test_a_zstd_window_larger_than_the_standard_allows_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    body = zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(b"x" * 64)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = frame.compress(b"x" * (9 * MIB)) + frame.flush()
    with pytest.raises(InvalidJSON, match="zstd"):
        decompress(body, "zstd", 48 * MIB)


@pytest.mark.anyio
async def test_a_declared_length_over_the_limit_is_refused_before_anything_is_read():
    request, sent = request_of([b"x"], content_length=str(SETTINGS.max_body_bytes + 1))
    with pytest.raises(BodyTooLarge):
        await read_body(request, SETTINGS)
    assert sent["taken"] == 0


@pytest.mark.anyio
async def test_a_body_without_a_length_is_refused_as_soon_as_it_passes_the_limit():
    request, sent = request_of([b" " * MIB] * 200)
    with pytest.raises(BodyTooLarge):
        await read_body(request, SETTINGS)
    assert sent["taken"] == 5


@pytest.mark.anyio
@pytest.mark.parametrize("body", [b"", b"  \n", b"[]", b'"x"', b"1", b"null", b"true"])
async def test_only_an_object_is_a_request(body):
    with pytest.raises((InvalidJSON, InvalidRequest)) as caught:
        await read(body)
    assert "object" in caught.value.message


@pytest.mark.parametrize(
    "header",
    [
        None,
        "application/json",
        "application/json; charset=utf-8",
        'Application/JSON;charset="UTF-8"',
        "text/json",
        "application/vnd.api+json",
    ],
)
def test_json_media_types_pass(header):
    check_media_type(header)


@pytest.mark.parametrize(
    "header",
    [
        "multipart/form-data; boundary=x",
        "text/plain",
        "application/x-www-form-urlencoded",
        "",
        ";",
        "image/png",
        "application/json; charset=utf-16",
        "x" * 100_000,
    ],
)
def test_other_media_types_are_refused_by_name(header):
    with pytest.raises(UnsupportedMediaType, match=r"send (application/json|UTF-8)") as caught:
        check_media_type(header)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("headers", "coding"),
    [([], "identity"), (["identity"], "identity"), (["identity, gzip"], "gzip"), ([""], "identity")],
)
def test_content_codings_that_pass(headers, coding):
    assert content_coding(headers) == coding


@pytest.mark.parametrize("headers", [["br"], ["deflate"], ["gzip, gzip"], ["gzip", "zstd"], ["x" * 10_000]])
def test_other_codings_are_refused(headers):
    with pytest.raises(UnsupportedEncoding) as caught:
        content_coding(headers)
    assert len(caught.value.message) < 300


COMPRESSED = st.builds(
    lambda encode, body: encode(body),
    st.sampled_from([gzip.compress, zstandard.compress]),
    st.binary(max_size=99),
)


@pytest.mark.anyio
@hypothesis_settings(max_examples=300)
@given(
    body=st.binary(max_size=300) | COMPRESSED,
    coding=st.sampled_from(["identity", "gzip", "zstd", "br", "gzip, gzip", "\x00"]),
    media_type=st.sampled_from(["application/json", "multipart/form-data", "text/plain; charset=x", ""]),
)
async def test_any_body_gives_an_object_or_a_request_error(body, coding, media_type):
    with contextlib.suppress(RequestError):
        assert isinstance(await read(body, content_encoding=coding, content_type=media_type), dict)
