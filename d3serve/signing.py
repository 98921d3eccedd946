"""Standard Webhooks 1.0.0 signatures: HMAC-SHA256 over `id.timestamp.body`, several secrets while one rotates."""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Final

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


def verify(headers: Mapping[str, str], body: bytes, secret: str, *, now_s: float | None = None) -> None:
    """Return when a delivery is ours, whole and fresh: signed with `secret` within the last five minutes.

    Raises:
        InvalidRequest: it is not; says which of the three.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    try:
        webhook_id, timestamp = lowered["webhook-id"], lowered["webhook-timestamp"]
        offered = lowered["webhook-signature"].split()
        sent_s = int(timestamp)
    except (KeyError, ValueError):
        raise InvalidRequest(
            "the webhook headers are missing or malformed", field="webhook-signature"
        ) from None
    if abs((time.time() if now_s is None else now_s) - sent_s) > TOLERANCE_S:
        raise InvalidRequest(f"the webhook is not of the last {TOLERANCE_S} s", field="webhook-timestamp")
    wanted = f"v1,{_sign(webhook_id, sent_s, body, secret)}"
    if not any(hmac.compare_digest(one.encode("utf-8", "replace"), wanted.encode()) for one in offered):
        raise InvalidRequest("no signature of the webhook fits the secret", field="webhook-signature")


def _sign(webhook_id: str, timestamp_s: int, body: bytes, secret: str) -> str:
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except ValueError:
        key = b""
    if len(key) not in ALLOWED_BYTES:  # with an empty one, as an unset variable gives it, anybody can sign
        raise InvalidRequest("a webhook secret is whsec_ and base64 of 24 to 64 bytes", field="secret")
    message = f"{webhook_id}.{timestamp_s}.".encode("utf-8", "replace") + body
    return base64.b64encode(hmac.new(key, message, hashlib.sha256).digest()).decode()
