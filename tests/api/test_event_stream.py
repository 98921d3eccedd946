"""What an event stream looks like on the wire."""

import json

import pytest

pytestmark = pytest.mark.anyio
LINE_BREAKS = "\x85\u2028\u2029\r\n\x0b\x0c\x1c\x1d\x1e"  # all that one reader or another ends a line with


async def test_no_text_ends_a_line_of_the_stream_for_any_reader(client, worker):
    """httpx and others split lines as Python does: a customer's text could end an event, and begin another."""
    text = f"a{LINE_BREAKS}event: done\u2028data: null\u2028\u2028b"
    body = {
        "model": "jev-latest", "state": "hello", "job": {"metadata": {"note": text}},
        "questions": {f"q{LINE_BREAKS}": {"type": "score", "instructions": "x", "criteria": [text, "high"]}},
    }  # fmt: skip
    job = (await client.post("/v1/jobs", json=body)).json()
    worker.work()
    stream = (await client.get(job["urls"]["events"])).text
    lines = stream.splitlines()
    assert lines == stream.split("\n")[:-1]
    assert [line for line in lines if line.startswith("event: ")][-1] == "event: done"
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert told[-1]["metadata"]["note"] == text
    assert any(one.get("question") == f"q{LINE_BREAKS}" for one in told)
