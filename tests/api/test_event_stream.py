"""What an event stream looks like on the wire."""

import asyncio
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


async def test_a_job_that_was_given_back_is_told_as_queued_and_by_its_new_share(client, worker):
    """Given back uncharged its attempt has the same number again: what was told of it is no longer so."""
    body = {
        "model": "jev-latest",
        "state": "hello",
        "questions": {"q": {"type": "noul", "instructions": "x"}},
    }
    job = (await client.post("/v1/jobs", json=body)).json()
    turn = worker.claim()
    worker.turns.note_share(turn.lease, [job["id"]], 0.5, 9.0)
    worker.turns.free(turn.lease, "back")
    headers = {"Last-Event-ID": "1.2.500"}
    stream = asyncio.ensure_future(client.get(job["urls"]["events"], headers=headers))
    await asyncio.wait([stream], timeout=1)  # it reads the job as it is now
    worker.work()
    names = [line for line in (await stream).text.splitlines() if line.startswith("event: ")]
    assert names == [f"event: {name}" for name in ("queued", "started", "progress", "answer", "done")]
