"""The parts of a multipart/form-data body, as the stock SDK sends images: a few, each with a name."""

import re
from typing import Final

from d3serve.errors import InvalidRequest, UnsupportedMediaType
from d3serve.media.files import MAX_FILES
from d3serve.text.wording import shown

REQUEST: Final = "request"  # the part that holds the JSON
MAX_PARTS: Final = MAX_FILES + 1
MAX_HEAD_BYTES: Final = 1024
_BOUNDARY: Final = re.compile(r'\bboundary="?([A-Za-z0-9\'()+_,./:=? -]{1,70})"?', re.IGNORECASE)
_NAME: Final = re.compile(
    rb'^content-disposition:\s*form-data;[^\r\n]*?\bname="([^"\r\n]*)"', re.IGNORECASE | re.MULTILINE
)
_ENCODING: Final = re.compile(
    rb"^content-transfer-encoding:\s*(?!binary|8bit|7bit)", re.IGNORECASE | re.MULTILINE
)


def boundary_of(content_type: str | None) -> bytes | None:
    """What separates the parts of a body; None where it has none.

    Raises:
        UnsupportedMediaType: it should have, and its header does not tell.
    """
    if content_type is None or content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        return None
    if (found := _BOUNDARY.search(content_type)) is None:
        raise UnsupportedMediaType(
            "a multipart body needs a boundary of 1 to 70 characters in its content type"
        )
    return found[1].encode()


def split_parts(body: bytes, boundary: bytes) -> dict[str, bytes]:
    """The parts by name, in their order; `request` is among them.

    Raises:
        InvalidRequest: the body is cut off, has too many parts, or two of one name.
    """
    mark = b"\r\n--" + boundary
    whole = b"\r\n" + body
    if (count := whole.count(mark) - 1) > MAX_PARTS:
        raise InvalidRequest(f"the body has {count} parts; there may be {MAX_PARTS}")
    _, *parts = whole.split(mark)
    if len(parts) < 2 or not parts.pop().startswith(b"--"):
        raise InvalidRequest("the multipart body is cut off: its last boundary is missing")
    found: dict[str, bytes] = {}
    for place, part in enumerate(parts):
        head, gap, content = part.partition(b"\r\n\r\n")
        name = _NAME.search(head[: MAX_HEAD_BYTES + 1])
        if not gap or len(head) > MAX_HEAD_BYTES or name is None:
            raise InvalidRequest(f"part {place} has no name, or headers of more than {MAX_HEAD_BYTES} bytes")
        if _ENCODING.search(head):
            raise InvalidRequest(f"part {place} is encoded; send its bytes as they are")
        text = name[1].decode(errors="replace")
        if text in found:
            raise InvalidRequest(f"two parts have the name {shown(text)}")
        found[text] = content
    if REQUEST not in found:
        raise InvalidRequest(f'the body has no part "{REQUEST}" with the JSON of the request')
    return found
