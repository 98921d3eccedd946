"""`/docs` and `/redoc`: the OpenAPI document to read and to try, all of files served here: no other host is asked."""

from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response

_PAGES: Final = Path(__file__).parent / "pages"
# Both draw with styles that they make as they go; a script runs from a file of ours or not at all.
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs() -> FileResponse:
    """Every operation, to be tried from the browser (Swagger UI)."""
    return FileResponse(_PAGES / "docs.html", headers=_HEADERS)


@router.get("/redoc")
async def redoc() -> FileResponse:
    """The same to be read (Redoc)."""
    return FileResponse(_PAGES / "redoc.html", headers=_HEADERS)


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """The file, which a browser may keep as long as it asks whether it is still so."""
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


# Our few lines, and the scripts of both pages as the package `fastapi_offline` ships them.
files: Final = _Files(directory=_PAGES / "files", packages=[("fastapi_offline", "static")])
