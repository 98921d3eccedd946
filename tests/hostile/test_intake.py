"""The processes that read large bodies: they give what reading in place gives, are replaced, and end with the API."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from processes import ends

from d3serve.api.intake import Intake, take_in
from d3serve.errors import DuplicateKey, InvalidQuestion
from d3serve.settings import Settings

NOUL = {"type": "noul", "instructions": "Is it spam?"}
LARGE = {"model": "jev-latest", "state": ["a sentence. "] * 9_000, "questions": {"q": NOUL}}
SETTINGS = Settings()


def children(pid):
    """Processes of a process, but for the one that `multiprocessing` keeps to tidy up."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found if b"resource_tracker" not in Path(f"/proc/{one}/cmdline").read_bytes()]


@pytest.fixture
def started():
    """Lists what the test has started: fixtures of a session have servers among this process's children."""
    before = children(os.getpid())
    return lambda: [pid for pid in children(os.getpid()) if pid not in before]


@pytest.mark.anyio
async def test_a_large_body_is_read_like_a_small_one(started):
    with contextlib.closing(Intake(SETTINGS)) as intake:
        assert started() == [], "no process before there is need"
        body = json.dumps(LARGE).encode()
        assert await intake.take_in(body) == take_in(body, SETTINGS, any_dialect=False)
        openai = {
            "model": "m",
            "input": "x" * 70_000,
            "questions": [{"type": "predicate", "instructions": "x"}],
        }
        body = json.dumps(openai).encode()
        assert await intake.take_in(body, any_dialect=True) == take_in(body, SETTINGS, any_dialect=True)
        wrong = json.dumps(LARGE | {"questions": {"q": NOUL, "p": {"type": "x"}}}).encode()
        with pytest.raises(InvalidQuestion) as caught:
            await intake.take_in(wrong)
        assert caught.value.field == "questions.p.type"
        assert caught.value.details["errors"][0]["pointer"] == "/questions/p/type"
        with pytest.raises(DuplicateKey):
            await intake.take_in(b'{"model":"m","model":"m","state":"' + b"x" * 70_000 + b'"}')


@pytest.mark.anyio
async def test_a_process_that_is_killed_is_replaced(started):
    with contextlib.closing(Intake(SETTINGS)) as intake:
        body = json.dumps(LARGE).encode()
        before = await intake.take_in(body)
        killed = started()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert await intake.take_in(body) == before
        present = started()
        assert set(present) - set(killed)
    assert all(ends(pid, 30) for pid in present)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_they_end_with_the_api(how, start_api):
    api = start_api()
    assert api.call("POST", "/v1/jobs", json.dumps(LARGE))[0] == 202
    readers = children(api.process.pid)
    assert readers
    api.process.send_signal(how)
    assert all(ends(pid, 30) for pid in (api.process.pid, *readers))
