"""`/v1/files` and `/v1/batches`, as OpenAI's clients call them."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field, TypeAdapter
from starlette.responses import StreamingResponse

from d3serve.api.auth import Reader, Writer
from d3serve.api.batch_models import (
    BatchList,
    BatchRequest,
    BatchResource,
    FileDeleted,
    FileList,
    FileResource,
    batch_resource,
    file_resource,
    page_of,
)
from d3serve.api.bodies import read_object
from d3serve.api.dependencies import TheParts, submit_headers
from d3serve.api.openapi import PROBLEMS, keyed_body_of
from d3serve.api.resources import JSON
from d3serve.api.uploads import FIELDS, take_file
from d3serve.api.validation import check_body
from d3serve.store.batches import BatchTerms

router = APIRouter(tags=["batches"], responses=PROBLEMS)
FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"
BYTES: Final = "application/octet-stream"  # which OpenAI answers, and generators of clients know
RETRIES: Final = "x-stainless-retry-count"  # of OpenAI's clients, which send no key
_BATCH: Final = TypeAdapter(BatchRequest)
_FORM: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "JSON lines in UTF-8."},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        **{name: {"type": "string"} for name in FIELDS[1:]},
                    },
                }
            }
        },
    }
}


class FilesPage(BaseModel):
    """Which files to list."""

    purpose: Literal["batch", "batch_output"] | None = None
    after: str | None = Field(default=None, max_length=64)
    limit: int = Field(default=100, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"


class BatchesPage(BaseModel):
    """Which batches to list."""

    after: str | None = Field(default=None, max_length=64)
    limit: int = Field(default=20, ge=1, le=100)


@router.post(FILES, response_model=FileResource, openapi_extra=_FORM)
async def upload_file(request: Request, parts: TheParts, tenant: Writer) -> Response:
    """Take a file of requests, one a line: `custom_id`, `method`, `url` and `body`."""
    return JSON(file_resource(await take_file(request, parts.batches.files, tenant)))


@router.get(FILES, response_model=FileList)
async def list_files(parts: TheParts, tenant: Reader, page: Annotated[FilesPage, Query()]) -> Response:
    """The caller's files, newest first unless `order` is `asc`."""
    files, more = await parts.batches.files.page(
        tenant, purpose=page.purpose, after=page.after, limit=page.limit, oldest_first=page.order == "asc"
    )
    return JSON(page_of([file_resource(file) for file in files], more))


@router.get(FILES + "/{file_id}", response_model=FileResource)
async def get_file(file_id: str, parts: TheParts, tenant: Reader) -> Response:
    """One file."""
    return JSON(file_resource(await parts.batches.files.get(file_id, tenant)))


@router.get(
    FILES + "/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}},
)
async def file_content(file_id: str, parts: TheParts, tenant: Reader) -> Response:
    """The contents of a file, as they are."""
    files = parts.batches.files
    file = await files.get(file_id, tenant)
    contents = files.contents(file)
    first = await anext(contents)  # so that a file that has gone is told of before an answer begins

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for piece in contents:
            yield piece

    return StreamingResponse(whole(), headers={"Content-Length": str(file.bytes)}, media_type=BYTES)


@router.delete(FILES + "/{file_id}", response_model=FileDeleted)
async def delete_file(file_id: str, parts: TheParts, tenant: Writer) -> Response:
    """Erase a file; 409 while a batch reads it."""
    await parts.batches.files.delete(file_id, tenant)
    return JSON({"id": file_id, "object": "file", "deleted": True})


@router.post(BATCHES, response_model=BatchResource, openapi_extra=keyed_body_of(BatchRequest))
async def create_batch(request: Request, parts: TheParts, tenant: Writer) -> Response:
    """Ask every request of a file, within a day. A call that is sent again makes none."""
    key = submit_headers(request.headers).idempotency_key
    again = request.headers.get(RETRIES, "0") != "0"
    asked = check_body(_BATCH, await read_object(request, parts.settings))
    kept = asked.output_expires_after
    terms = BatchTerms(asked.input_file_id, asked.endpoint, asked.metadata, kept.seconds if kept else None)
    batch = await parts.batches.create(tenant, terms, key=key, again=again)
    return JSON(batch_resource(batch))


@router.get(BATCHES, response_model=BatchList)
async def list_batches(parts: TheParts, tenant: Reader, page: Annotated[BatchesPage, Query()]) -> Response:
    """The caller's batches, newest first."""
    batches, more = await parts.batches.page(tenant, after=page.after, limit=page.limit)
    return JSON(page_of([batch_resource(batch) for batch in batches], more))


@router.get(BATCHES + "/{batch_id}", response_model=BatchResource)
async def get_batch(batch_id: str, parts: TheParts, tenant: Reader) -> Response:
    """One batch."""
    return JSON(batch_resource(await parts.batches.get(batch_id, tenant)))


@router.post(BATCHES + "/{batch_id}/cancel", response_model=BatchResource)
async def cancel_batch(batch_id: str, parts: TheParts, tenant: Writer) -> Response:
    """End a batch early; what is answered by then is in its output file. One that is over stays as it is."""
    return JSON(batch_resource(await parts.batches.cancel(batch_id, tenant)))
