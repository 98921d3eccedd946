"""What both clients do before anything is sent: whom to ask, with which key, and the body of a request."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d3serve.client.questions import questions_json
from d3serve.errors import InvalidRequest

DEFAULT_MODEL = "jev-latest"
DEFAULT_URL = "http://127.0.0.1:8000"


def named_server(base_url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """Address and key; where no address is given, those of the environment, so that no key goes to another server.

    Raises:
        InvalidRequest: the file that D3SERVE_API_KEY_FILE names cannot be read.
    """
    if base_url is not None:
        return base_url, api_key
    file = os.environ.get("D3SERVE_API_KEY_FILE")
    key = api_key or os.environ.get("D3SERVE_API_KEY") or read_key_file(Path(file) if file else None)
    return os.environ.get("D3SERVE_URL") or DEFAULT_URL, key


def read_key_file(file: Path | None) -> str | None:
    """The API key in a file; None where there is none.

    Raises:
        InvalidRequest: it cannot be read.
    """
    if file is None:
        return None
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the API key in {file}: {error}", field="api_key_file") from None


def key_headers(api_key: str | None) -> dict[str, str]:
    """The header that carries the key.

    Raises:
        InvalidRequest: no header can.
    """
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise InvalidRequest(
            "the API key holds a blank, a line break or a character beyond ASCII: it is no key of ours",
            field="api_key",
        )
    return {"Authorization": f"Bearer {api_key}"}


def request_body(state: Any, questions: Any, model: str, job: Mapping[str, Any] | None) -> dict[str, Any]:
    """The body of a submission."""
    body = {"model": model, "state": state, "questions": questions_json(questions)}
    return body | ({"job": job} if job else {})
