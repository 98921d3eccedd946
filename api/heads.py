"""What the head of a request may say, before anything else looks at it."""

from typing import Final

from starlette.types import Scope

from d3serve.errors import RequestError

VERSIONS: Final = ("1.0", "1.1")
# Fields of which only the first would count here, and perhaps the last to somebody in between.
ONCE: Final = frozenset(
    {
        b"authorization",
        b"content-length",
        b"content-type",
        b"host",
        b"idempotency-key",
        b"last-event-id",
        b"origin",
        b"sec-fetch-site",
        b"transfer-encoding",
    }
)


def check_head(scope: Scope) -> None:
    """Return if there is one way to read the head: where a proxy and we could differ, a request is smuggled.

    Raises:
        RequestError: it names the field.
    """
    version = scope["http_version"]
    if version not in VERSIONS:
        raise RequestError("only HTTP/1.0 and HTTP/1.1 are spoken here")
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in ONCE:
            if name in found:
                field = name.decode()
                raise RequestError(f"more than one {field} header; send one", field=field)
            found[name] = value
    if version == "1.1" and b"host" not in found:
        raise RequestError("HTTP/1.1 needs a Host header", field="host")
    coding = found.get(b"transfer-encoding", b"chunked").strip().lower()
    if coding != b"chunked" or (version == "1.0" and b"transfer-encoding" in found):
        raise RequestError(
            "of transfer codings only `chunked` is read here, in HTTP/1.1", field="transfer-encoding"
        )
