"""Our signatures against independent verifiers, and our verifier against tampering."""

import base64
import email.message
import hmac
import io
import time
from datetime import UTC, datetime

import httpx
import pytest
import standardwebhooks

from d3serve.client import verify_webhook
from d3serve.errors import InvalidRequest
from d3serve.webhooks.signing import new_secret, signature_headers, verify

BODY = '{"type":"job.succeeded","data":{"é":"\u2028"}}'.encode()


def independent_verifiers():
    yield lambda secret, body, headers: standardwebhooks.Webhook(secret).verify(body, headers)
    try:
        import svix
    except ImportError:
        return
    yield lambda secret, body, headers: svix.webhooks.Webhook(secret).verify(body, headers)


@pytest.mark.parametrize("check", list(independent_verifiers()))
def test_independent_verifiers_accept_our_signatures(check):
    secret, other = new_secret(), new_secret()
    now = int(time.time())
    for signing in ([secret], [secret, other], [other, secret]):
        headers = signature_headers("msg_1", now, BODY, signing)
        check(secret, BODY.decode(), headers)
    with pytest.raises(Exception, match=r"(?i)signature"):
        check(secret, BODY.decode() + " ", headers)


def test_our_verifier_accepts_theirs():
    secret, now = new_secret(), int(time.time())
    headers = signature_headers("msg_1", now, BODY, [secret])
    signed = standardwebhooks.Webhook(secret).sign("msg_1", datetime.fromtimestamp(now, UTC), BODY.decode())
    verify({**headers, "Webhook-Signature": f"v1a,xyz {signed}"}, BODY, secret)
    assert signed == headers["webhook-signature"]


def test_a_secret_is_32_random_bytes():
    secret = new_secret()
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret[6:])) == 32
    assert secret != new_secret()


def good():
    secret, now = new_secret(), 1_000_000
    return secret, now, signature_headers("msg_1", now, BODY, [secret])


@pytest.mark.parametrize(
    "tamper",
    [
        lambda h, _: h.update({"webhook-id": "msg_2"}),
        lambda h, _: h.update({"webhook-timestamp": "1000001"}),
        lambda h, _: h.update({"webhook-signature": "v1,AAAA"}),
        lambda h, _: h.update({"webhook-signature": "é"}),
        lambda h, _: h.pop("webhook-signature"),
        lambda h, _: h.update({"webhook-timestamp": "soon"}),
        lambda _, body: body.append(b" "),
    ],
)
def test_whatever_is_changed_is_refused(tamper):
    secret, now, headers = good()
    body = [BODY]
    tamper(headers, body)
    with pytest.raises(InvalidRequest):
        verify(headers, b"".join(body), secret, now_s=now)


@pytest.mark.parametrize("age", [-301, 301])
def test_a_replay_is_refused_by_its_age(age):
    secret, now, headers = good()
    verify(headers, BODY, secret, now_s=now + age * 300 / 301)
    with pytest.raises(InvalidRequest, match="last 300 s"):
        verify(headers, BODY, secret, now_s=now + age)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_" + base64.b64encode(b"x" * 23).decode()])
def test_a_secret_that_anybody_could_guess_verifies_nothing(secret):
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.new(key, b"msg_1.1000." + BODY, "sha256").digest()).decode()
    forged = {"webhook-id": "msg_1", "webhook-timestamp": "1000", "webhook-signature": f"v1,{signature}"}
    with pytest.raises(InvalidRequest, match="24 to 64 bytes"):
        verify(forged, BODY, secret, now_s=1000.0)


@pytest.mark.parametrize("name", ["webhook-id", "webhook-signature"])
def test_a_header_that_is_no_text_is_refused_like_any_other(name):
    """Some frameworks hand on bytes beyond UTF-8 as surrogates."""
    secret = new_secret()
    headers = signature_headers("msg_1", 1000, BODY, [secret]) | {name: "v1,\udcff"}
    with pytest.raises(InvalidRequest, match="no signature"):
        verify(headers, BODY, secret, now_s=1000.0)


def test_another_secret_is_refused():
    _, now, headers = good()
    with pytest.raises(InvalidRequest, match="no signature"):
        verify(headers, BODY, new_secret(), now_s=now)
    with pytest.raises(InvalidRequest, match="base64"):
        verify(headers, BODY, "whsec_é", now_s=now)


def _message(headers):
    message = email.message.Message()
    for name, value in headers.items():
        message[name] = value
    return message


SHAPES = {
    "texts": lambda headers: headers,
    "capitals": lambda headers: {name.title(): value for name, value in headers.items()},
    "bytes": lambda headers: {name.encode(): value.encode() for name, value in headers.items()},
    "bytes of texts": lambda headers: {name: value.encode() for name, value in headers.items()},
    "lists of one": lambda headers: {name: [value] for name, value in headers.items()},
    "pairs, as ASGI has them": lambda headers: [
        (name.encode(), value.encode()) for name, value in headers.items()
    ],
    "a number": lambda headers: headers | {"webhook-timestamp": int(headers["webhook-timestamp"])},
    "email.message": _message,
    "httpx": httpx.Headers,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "body", [BODY, BODY.decode(), bytearray(BODY), memoryview(BODY)], ids=lambda b: type(b).__name__
)
def test_headers_and_body_are_taken_as_frameworks_have_them(shape, body):
    secret, now, headers = good()
    verify(SHAPES[shape](headers), body, secret, now_s=now)
    with pytest.raises(InvalidRequest, match="no signature"):
        verify(SHAPES[shape](headers), BODY + b" ", secret, now_s=now)


@pytest.mark.parametrize(
    "headers",
    [
        None,
        1,
        "webhook-id: x",
        [1],
        [("webhook-id",)],
        {},
        {1: 2},
        {"webhook-id": None},
        {"webhook-timestamp": []},
    ],
)
def test_what_are_no_headers_is_refused_like_missing_ones(headers):
    with pytest.raises(InvalidRequest, match="missing or malformed"):
        verify(headers, BODY, new_secret())


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp"])
def test_a_header_that_stands_twice_is_refused(name):
    secret, now, headers = good()
    for doubled in (headers | {name: [headers[name]] * 2}, [*headers.items(), (name, headers[name])]):
        with pytest.raises(InvalidRequest, match="missing or malformed"):
            verify(doubled, BODY, secret, now_s=now)


@pytest.mark.parametrize("body", [None, {"type": "job.succeeded"}, 7, [BODY], io.BytesIO(BODY)])
def test_a_body_that_was_parsed_already_is_refused_by_name(body):
    secret, now, headers = good()
    with pytest.raises(InvalidRequest, match="before they are parsed"):
        verify(headers, body, secret, now_s=now)


@pytest.mark.parametrize("secret", [None, b"whsec_", 7, "whsec_AAAA\n"])
def test_a_secret_that_is_no_text_of_ours_is_refused_by_name(secret):
    _, now, headers = good()
    with pytest.raises(InvalidRequest, match="24 to 64 bytes"):
        verify(headers, BODY, secret, now_s=now)


def test_a_webhook_is_verified_by_the_client():
    secret = new_secret()
    headers = signature_headers("msg_1", int(time.time()), b"{}", [secret])
    verify_webhook(headers, b"{}", secret)
    with pytest.raises(InvalidRequest):
        verify_webhook(headers, b"{ }", secret)
