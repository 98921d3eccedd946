"""Standard Webhooks 1.0.0 signatures: HMAC-SHA256 over `id.timestamp.body`, several secrets while one rotates."""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from d3serve.errors import InvalidRequest

PREFIX: Final = "whsec_"
SECRET_BYTES: Final = 32
ALLOWED_BYTES: Final = range(24, 65)  # by the standard
TOLERANCE_S: Final = 300


def new_secret() -> str:
    """A fresh secret, `whsec_` and base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature_headers(
    webhook_id: str, timestamp_s: int, body: bytes, signing_secrets: Sequence[str]
) -> dict[str, str]:
    """The three headers of a delivery; one signature for each secret, newest first."""
    signatures = [_sign(webhook_id, timestamp_s, body, secret) for secret in signing_secrets]
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def verify(
    headers: Mapping[Any, Any] | Iterable[tuple[Any, Any]],
    body: str | bytes | bytearray | memoryview,
    secret: str,
    *,
    now_s: float | None = None,
) -> None:
    """Return when a delivery is ours, whole and fresh: signed with `secret` within the last five minutes.

    `headers` as any framework has them: names and values may be text or bytes, a value may stand in a list of
    one, and pairs do as well as a mapping. `body` is what arrived, before anything parsed it.

    Raises:
        InvalidRequest: it is not; says which of the three.
    """
    try:
        webhook_id, sent_s, offered = _our_headers(headers)
    except (KeyError, ValueError, TypeError, AttributeError):
        raise InvalidRequest(
            "the webhook headers are missing or malformed", field="webhook-signature"
        ) from None
    if not isinstance(body, str | bytes | bytearray | memoryview):
        raise InvalidRequest("the body must be the bytes that arrived, before they are parsed", field="body")
    raw = body.encode("utf-8", "replace") if isinstance(body, str) else bytes(body)
    if abs((time.time() if now_s is None else now_s) - sent_s) > TOLERANCE_S:
        raise InvalidRequest(f"the webhook is not of the last {TOLERANCE_S} s", field="webhook-timestamp")
    wanted = f"v1,{_sign(webhook_id, sent_s, raw, secret)}"
    if not any(hmac.compare_digest(one.encode("utf-8", "replace"), wanted.encode()) for one in offered):
        raise InvalidRequest("no signature of the webhook fits the secret", field="webhook-signature")


def _our_headers(headers: Any) -> tuple[str, int, list[str]]:
    """The three headers; only signatures may stand there more than once. An error of Python's for another shape."""
    found: dict[str, list[Any]] = {}
    for name, value in headers.items() if hasattr(headers, "items") else headers:
        values = value if isinstance(value, list | tuple) else [value]
        found.setdefault(_text(name).lower(), []).extend(values)
    (webhook_id,), (timestamp,) = found["webhook-id"], found["webhook-timestamp"]
    offered = [_text(value) for value in found["webhook-signature"]]
    return _text(webhook_id), int(_text(timestamp)), " ".join(offered).split()


def _text(value: Any) -> str:
    """A name or value of a header: bytes are read as HTTP has them, and a timestamp may be a number already."""
    return value.decode("latin-1") if isinstance(value, bytes | bytearray) else str(value)


def _sign(webhook_id: str, timestamp_s: int, body: bytes, secret: str) -> str:
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (
        ValueError,
        AttributeError,
        TypeError,
    ):  # no base64, or no text: None, as a missing variable gives it
        key = b""
    if len(key) not in ALLOWED_BYTES:  # with an empty one, as an unset variable gives it, anybody can sign
        raise InvalidRequest("a webhook secret is whsec_ and base64 of 24 to 64 bytes", field="secret")
    message = f"{webhook_id}.{timestamp_s}.".encode("utf-8", "replace") + body
    return base64.b64encode(hmac.new(key, message, hashlib.sha256).digest()).decode()
