"""What the OpenAPI document says beyond what FastAPI reads from the routes: raw bodies, the error body."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from d3serve.api.problems import Problem

REF: Final = "#/components/schemas/{model}"
# One entry stands for every error: the statuses differ by route and code, the body never does.
PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": Problem, "description": "Refused; the body says why."},
    "5XX": {"model": Problem, "description": "Not served now; the body says why."},
}


def body_of(model: type[BaseModel], *, or_else: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The description of a body that a route reads raw, in one of two dialects if `or_else` describes another."""
    schema = model.model_json_schema(ref_template=REF)
    if or_else is not None:
        schema = {"$defs": schema.pop("$defs", {}), "anyOf": [schema, or_else]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made once: bodies that routes read raw are described by their pydantic models."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            routes=app.routes,
            tags=app.openapi_tags,
        )
        components = document.setdefault("components", {}).setdefault("schemas", {})
        for operations in document["paths"].values():
            for operation in operations.values():
                for content in operation.get("requestBody", {}).get("content", {}).values():
                    components.update(content["schema"].pop("$defs", {}))
                for status, response in operation["responses"].items():
                    if status in PROBLEMS:
                        response["content"] = {
                            "application/problem+json": response["content"]["application/json"]
                        }
                operation["responses"].pop("422", None)  # FastAPI's own error body, which we never send
        app.openapi_schema = document
    return app.openapi_schema
