"""Takes an uploaded file in as it comes: in memory there is a piece of it at most."""

import re
from typing import Final

from fastapi import Request

from d3serve.api import bounds
from d3serve.api.batch_models import LEAST_TTL_S, MOST_TTL_S
from d3serve.api.bodies import content_coding
from d3serve.api.form_stream import FormStream
from d3serve.api.multipart import boundary_of
from d3serve.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding, UnsupportedMediaType
from d3serve.store.files import MAX_FILE_BYTES, FileRecord, FileStore
from d3serve.store.pieces import PIECE_BYTES
from d3serve.text.wording import shown

MAX_NAME_CHARS: Final = 256
FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_SECONDS: Final = re.compile(r"\d{1,9}")


async def take_file(request: Request, files: FileStore, tenant: str) -> FileRecord:
    """The file in a multipart body.

    Raises:
        UnsupportedMediaType, UnsupportedEncoding: it is in no form that can be read as it comes.
        InvalidRequest: a field of the form is missing, unknown or has another value than it may, or the file is empty.
        BodyTooLarge, QuotaExceeded: the file is larger than any, or than this tenant's, may be.
        Overloaded, RateLimited: as for other bodies.
    """
    boundary = boundary_of(request.headers.get("content-type"))
    if boundary is None or "origin" in request.headers:  # no browser asks before it posts a form
        raise UnsupportedMediaType("send the file as multipart/form-data, and not from a web page")
    if content_coding(request.headers.getlist("content-encoding")) != "identity":
        raise UnsupportedEncoding("a file is not read compressed; send its bytes as they are")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > bounds.MAX_UPLOAD_BYTES:  # none of it need come
        raise BodyTooLarge(f"the file is larger than {MAX_FILE_BYTES:,} bytes", field="file")
    request.state.body_bytes.take(2 * PIECE_BYTES)
    upload = await files.upload(tenant)
    form = FormStream(request.stream(), boundary)
    try:
        await form.read(upload.add)
        ttl_s = _checked_fields(form)
        return await upload.finish(form.filename or "", "batch", ttl_s)
    except BaseException:
        await upload.drop()
        raise


def _checked_fields(form: FormStream) -> int | None:
    """For how long the form wants the file kept, if it says."""
    fields = form.fields
    for name in fields:
        if name not in FIELDS:
            known = ", ".join(("file", *FIELDS))
            raise InvalidRequest(f"{shown(name)} is no field of this form; there are {known}", field=name)
    if form.filename is None:
        raise InvalidRequest("the form has no file", field="file")
    if len(form.filename) > MAX_NAME_CHARS:
        raise InvalidRequest(f"the file's name is longer than {MAX_NAME_CHARS} characters", field="file")
    if fields.get("purpose") != "batch":
        raise InvalidRequest(f"purpose must be batch, not {shown(fields.get('purpose'))}", field="purpose")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"anchor must be created_at, not {shown(anchor)}", field="expires_after.anchor")
    if not _SECONDS.fullmatch(seconds or "") or not LEAST_TTL_S <= int(seconds or 0) <= MOST_TTL_S:
        told = f"seconds must be {LEAST_TTL_S:,} to {MOST_TTL_S:,}, not {shown(seconds)}"
        raise InvalidRequest(told, field="expires_after.seconds")
    return int(seconds or 0)
