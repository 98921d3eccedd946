"""`/console`, `/docs` and `/redoc`: pages for people, all of files served here: no other host is asked."""

from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response

_PAGES: Final = Path(__file__).parent / "pages"
# Not even a style stands in the page, and no script of it may turn a text into markup.
_CONSOLE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# Both of the others draw with styles that they make as they go; a script runs from a file of ours or not at all.
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def root(request: Request) -> RedirectResponse:
    """Lead a person to the console; a program finds nothing here."""
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(404)
    return RedirectResponse("console", headers={"Vary": "Accept"})


@router.get("/console")
async def console() -> FileResponse:
    """Ask, look after jobs and see the queue, from a browser."""
    return FileResponse(_PAGES / "console" / "index.html", headers=_CONSOLE_HEADERS)


@router.get("/console/")
async def console_with_slash() -> RedirectResponse:
    """The console names its files as from `/console`."""
    return RedirectResponse("../console")


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
console_files: Final = _Files(directory=_PAGES / "console" / "files")
