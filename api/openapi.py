"""What the OpenAPI document says beyond what FastAPI reads from the routes: raw bodies, headers, the error body."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from d3serve.api.problems import Problem

REF: Final = "#/components/schemas/{model}"
_HEADERS: Final[Mapping[str, str]] = {
    "ETag": "Names this state of the job; send it back as `If-None-Match`.",
    "Idempotency-Replayed": "`true`: an earlier request made this job.",
    "Location": "Where it is, relative to this host.",
    "Preference-Applied": "What of `Prefer` is obeyed.",
    "RateLimit": "What is left of the key's requests in this minute.",
    "RateLimit-Policy": "How many requests a minute the key has.",
    "Retry-After": "Seconds after which to ask again; `retry-after-ms` has them in milliseconds.",
    "Server-Timing": "Where the time went, in milliseconds.",
    "WWW-Authenticate": "With 401: `Bearer`.",
    "X-Request-Id": "Of this request, in the log and in every error.",
}
_SENT: Final[Mapping[str, str]] = {
    "Idempotency-Key": "1 to 255 printable characters: the same request under the same key is done once.",
    "Prefer": "`wait=N`: answer when the job is done, after N seconds at most. `respond-async`: do not wait.",
    "traceparent": "W3C Trace Context: the job is part of this trace, which its webhooks carry on.",
    "X-Request-Id": "An id of the caller's for this request: up to 64 letters, digits, dots, dashes and underscores.",
}


def operation_id(route: APIRoute) -> str:
    """What a generated client calls a route."""
    return route.name


def tells(*names: str) -> dict[str, Any]:
    """The description of a response with these headers."""
    return {"headers": {name: {"$ref": f"#/components/headers/{name}"} for name in names}}


# One entry stands for every error: the statuses differ by route and code, the body never does.
PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {
        "model": Problem, "description": "Refused; the body says why.",
        **tells("Location", "Retry-After", "WWW-Authenticate"),
    },
    "5XX": {
        "model": Problem, "description": "Not served now; the body says why.", **tells("Location", "Retry-After"),
    },
}  # fmt: skip


def submission_of(*models: type[BaseModel]) -> dict[str, Any]:
    """The description of a submission, whose body is one of these, and of the headers that steer it."""
    return {
        "parameters": [_sent(name) for name in ("Prefer", "Idempotency-Key", "traceparent")],
        **body_of(*models),
    }


def keyed_body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """The description of a raw body, and of the key that makes it safe to send again."""
    return {"parameters": [_sent("Idempotency-Key")], **body_of(*models)}


def _sent(name: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": {"type": "string"}, "description": _SENT[name]}


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """The description of a body that a route reads raw: one of these."""
    refs, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schema = {"anyOf": list(refs.values())} if len(models) > 1 else dict(*refs.values())
    schema["$defs"] = schemas["$defs"]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            routes=app.routes,
            tags=app.openapi_tags,
        )
        components = document["components"]
        components["headers"] = {
            name: {"description": told, "schema": {"type": "string"}} for name, told in _HEADERS.items()
        }
        components["parameters"] = {"RequestId": _sent("X-Request-Id")}
        for operations in document["paths"].values():
            for operation in operations.values():
                _complete(operation, components["schemas"])
        app.openapi_schema = document
    return app.openapi_schema


def _complete(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Describe what no route knows of itself: the schemas of its raw body, and what the edge adds to every answer."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schemas.update(content["schema"].pop("$defs", {}))
    operation.setdefault("parameters", []).append({"$ref": "#/components/parameters/RequestId"})
    operation["responses"].pop("422", None)  # FastAPI's own error body, which we never send
    limited = ("RateLimit", "RateLimit-Policy") if "security" in operation else ()
    everywhere = tells("X-Request-Id", "Server-Timing", *limited)["headers"]
    for status, response in operation["responses"].items():
        if status in PROBLEMS:  # which FastAPI describes as of the media type that a success has
            (content,) = response["content"].values()
            response["content"] = {"application/problem+json": content}
        response["headers"] = response.get("headers", {}) | everywhere
