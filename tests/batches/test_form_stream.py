"""A form that is read as it comes, wherever its bytes are cut."""

import pytest

from d3serve.api.form_stream import FormStream
from d3serve.errors import InvalidRequest

pytestmark = pytest.mark.anyio
FILE = b"one\r\n--almost\r\n\r\n--xy\r\ntwo\n\x00\xff" + b"z" * 50
BODY = (
    b'a preamble\r\n--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--xyz\r\nContent-Type: text/x\r\ncontent-disposition: form-data; name="file"; filename="a b.jsonl"\r\n\r\n'
    + FILE
    + b"\r\n--xyz--\r\nan epilogue"
)  # fmt: skip


async def read(*chunks, boundary=b"xyz"):
    async def stream():
        for chunk in chunks:
            yield chunk

    form, taken = FormStream(stream(), boundary), []

    async def take(data):
        taken.append(data)

    await form.read(take)
    return form, b"".join(taken), taken


@pytest.mark.parametrize("size", [1, 2, 3, 7, 13, 64, len(BODY)])
async def test_the_same_is_read_wherever_the_bytes_are_cut(size):
    form, file, _ = await read(*(BODY[start : start + size] for start in range(0, len(BODY), size)))
    assert (form.fields, form.filename, file) == ({"purpose": "batch"}, "a b.jsonl", FILE)


async def test_a_file_is_given_on_before_it_is_whole():
    chunks = [BODY[: BODY.index(FILE)], *[b"x" * 1_000] * 100, b"\r\n--xyz--\r\n"]
    _, file, taken = await read(*chunks)
    assert file == b"x" * 100_000
    assert max(map(len, taken)) <= 1_100


def part(name, value=b"v", head=b""):
    return (
        b"--xyz\r\n"
        + head
        + b'content-disposition: form-data; name="'
        + name
        + b'"\r\n\r\n'
        + value
        + b"\r\n"
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--xyz",
        BODY[:-30],
        BODY.replace(b"--xyz--", b"--xyz"),
        part(b"a") + part(b"a") + b"--xyz--",
        part(b"file") + part(b"file") + b"--xyz--",
        part(b"a", b"v" * 5_000) + b"--xyz--",
        part(b"a", head=b"x: " + b"y" * 5_000 + b"\r\n") + b"--xyz--",
        part(b"file", head=b"content-transfer-encoding: base64\r\n") + b"--xyz--",
        b"".join(part(b"%d" % number) for number in range(17)) + b"--xyz--",
        b"--xyz\r\ncontent-type: x\r\n\r\nv\r\n--xyz--",
        b"--xyzzy\r\n\r\n--xyz--",
        b"p" * 5_000 + b"\r\n--xyz--",
    ],
)
@pytest.mark.parametrize("size", [1, 4_096])
async def test_what_is_no_such_form_is_refused(body, size):
    with pytest.raises(InvalidRequest):
        await read(*(body[start : start + size] for start in range(0, len(body), size)))
