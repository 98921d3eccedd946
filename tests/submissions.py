"""What tests of `d3serve submit` share: running it, reading its rows, and an API that is in trouble."""

import io
import json
import sys
import time

from rich.console import Console

from d3serve.commands.submit import submit_file

QUIET = Console(file=io.StringIO())
NOUL = {"type": "noul", "instructions": "x"}


def run(files, url, **options):
    options = {"at_once": 8, "console": QUIET, "api_key": None} | options
    return submit_file(*files, url=url, **options)


def rows(files):
    """The rows of the result file by line; each stands there once."""
    found = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert len({row["line"] for row in found}) == len(found)
    return {row["line"]: row for row in found}


def statuses(files):
    return {line: row["status"] for line, row in sorted(rows(files).items())}


def jobs_made(worker):
    return worker.turns._table.client.zcard(worker.turns._key("jobs", "public"))


class Trouble:
    """Stands before an API: answers in its place while it has something to answer."""

    def __init__(self, app, answers):
        self.app, self.answers, self.told = app, answers, 0

    async def __call__(self, scope, receive, send):
        answer = None
        if scope["type"] == "http" and scope["path"] != "/healthz":
            body = await _body(receive) if scope["method"] == "POST" else b""
            receive, answer = _replay(body, receive), self.answers(scope, body)
        if answer is None:
            await self.app(scope, receive, send)
            return
        self.told += 1
        status, headers, content = answer
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


async def _body(receive):
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            return body


def _replay(body, receive):
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again():
        return waiting.pop() if waiting else await receive()

    return again


def problem(status, code):
    content = json.dumps({"code": code, "detail": "no", "error": {"field": None}}).encode()
    return status, [(b"content-type", b"application/problem+json")], content


def command(files, url, *more):
    return [
        sys.executable,
        "-m",
        "d3serve",
        "submit",
        str(files[0]),
        "--out",
        str(files[1]),
        "--url",
        url,
        *more,
    ]


def until(true, timeout_s=60):
    ends = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.02)
