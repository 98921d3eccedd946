"""The processes that read large bodies: they give what reading in place gives, are replaced, and end with the API."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

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


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until_gone(pids):
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "they live on"
        time.sleep(0.05)


@pytest.mark.anyio
async def test_a_large_body_is_read_like_a_small_one():
    with contextlib.closing(Intake(SETTINGS)) as intake:
        assert children(os.getpid()) == [], "no process before there is need"
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
async def test_a_process_that_is_killed_is_replaced():
    with contextlib.closing(Intake(SETTINGS)) as intake:
        body = json.dumps(LARGE).encode()
        before = await intake.take_in(body)
        for pid in children(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        assert await intake.take_in(body) == before
        started = children(os.getpid())
        assert started
    until_gone(started)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_they_end_with_the_api(how, start_api):
    api = start_api()
    assert api.call("POST", "/v1/jobs", json.dumps(LARGE))[0] == 202
    started = children(api.process.pid)
    assert started
    api.process.send_signal(how)
    until_gone([api.process.pid, *started])
