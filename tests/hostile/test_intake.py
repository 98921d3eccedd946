"""Large bodies: plain ones are read in place, others in processes, which are replaced and end with the API."""

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from hostile import odd_bodies
from processes import ends, is_alive

from d3serve.api import intake as module
from d3serve.api.bodies import Body
from d3serve.api.intake import BRIEF_BYTES, PLAIN_BYTES, VALUES_BYTES, Intake, is_plain, take_in
from d3serve.errors import D3ServeError, DuplicateKey, InvalidQuestion, ShuttingDown
from d3serve.settings import Settings

NOUL = {"type": "noul", "instructions": "Is it spam?"}
LARGE = {"model": "jev-latest", "state": ["a sentence. "] * 9_000, "questions": {"q": NOUL}}
SETTINGS = Settings()
MOST_S = 0.2  # of a processor; 0.01 s where nothing else runs
TEXT = 'He said: "Where, in C:\\\\new, is it?"\n' * 5_000 + "é" * 50_000


def children(pid):
    """Processes that `multiprocessing` has started for a process, but for the one that it keeps to tidy up."""
    found = [
        one for lines in Path(f"/proc/{pid}/task").glob("*/children") for one in read(lines).decode().split()
    ]
    return [int(one) for one in found if b"spawn_main" in read(Path(f"/proc/{one}/cmdline"))]


def read(path):
    """What the kernel says of a thread or process; nothing of one that has just ended."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture
def started():
    """Lists what the test has started: fixtures of a session have servers among this process's children."""
    before = children(os.getpid())
    return lambda: [pid for pid in children(os.getpid()) if pid not in before]


def request_of(state, **questions):
    return json.dumps(
        {"model": "m", "state": state, "questions": questions or {"q": NOUL}}, ensure_ascii=False
    )


@pytest.mark.anyio
async def test_a_long_text_is_read_in_place(started):
    with contextlib.closing(Intake(SETTINGS)) as intake:
        body = request_of(TEXT).encode()
        assert await intake.take_in(Body(body)) == take_in(Body(body), SETTINGS, any_dialect=False)
        with pytest.raises(InvalidQuestion):
            await intake.take_in(Body(request_of(TEXT, q=NOUL | {"type": "x"}).encode()))
        assert started() == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    "body",
    [
        request_of([[]] * 40_000),
        request_of(["\\", [[]] * 40_000, "\\"]),  # one string, for whoever takes its last quote to be escaped
        request_of(["", [9] * 40_000, ""]),
        request_of([10**1000] * 40),
        request_of('"' * 20_000),
        request_of("x", q=NOUL | {"instructions": "é" * 100_000}),
        request_of("x" * PLAIN_BYTES),
        json.dumps({"model": "m", "state": "x" * 90_000, "assets": {"x": {}}}),
        json.dumps({"model": "m", "input": [{"content": "x" * 90_000}], "questions": []}),
    ],
    ids=[
        "lists", "escaped backslashes", "numbers", "digits", "quotes", "instructions", "too long a text", "assets",
        "messages",
    ],
)  # fmt: skip
async def test_what_may_take_long_is_read_elsewhere(body, started):
    with contextlib.closing(Intake(SETTINGS)) as intake:
        with contextlib.suppress(D3ServeError):
            await intake.take_in(Body(body.encode()))
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        behind_us = [os.getpriority(os.PRIO_PROCESS, pid) > ours for pid in started()]
        assert any(behind_us), "who reads large bodies goes behind the event loop"


def test_what_is_read_in_place_takes_a_moment():
    taken = {}
    for name, body in (
        odd_bodies.known(PLAIN_BYTES - 1_000).items() | odd_bodies.known(VALUES_BYTES - 200).items()
    ):
        began = time.process_time()
        if is_plain(body):
            with contextlib.suppress(D3ServeError):
                take_in(Body(body), SETTINGS, any_dialect=True)
            taken[name, len(body)] = time.process_time() - began
    assert len(taken) > 40
    assert max(taken.values()) < MOST_S, taken


@pytest.mark.anyio
async def test_others_get_their_turn_between_two_bodies(monkeypatch):
    reads = 0

    def read(*_args):
        nonlocal reads
        reads += 1
        return {}

    monkeypatch.setattr(module, "read_payload", read)
    monkeypatch.setattr(module, "check_payload", lambda *_args, **_options: None)
    with contextlib.closing(Intake(SETTINGS)) as intake:
        all_read = asyncio.gather(*(intake.take_in(Body(b" " * (BRIEF_BYTES + 1))) for _ in range(20)))
        while not all_read.done():
            before = reads
            await asyncio.sleep(0)
            assert reads <= before + 1, "two bodies were read, and nobody else came in between"
    assert reads == 20


@pytest.mark.anyio
async def test_a_large_body_is_read_like_a_small_one(started):
    with contextlib.closing(Intake(SETTINGS)) as intake:
        assert started() == [], "no process before there is need"
        body = json.dumps(LARGE).encode()
        assert await intake.take_in(Body(body)) == take_in(Body(body), SETTINGS, any_dialect=False)
        openai = {
            "model": "m",
            "input": "x" * 70_000,
            "questions": [{"type": "predicate", "instructions": "x"}],
        }
        body = json.dumps(openai).encode()
        assert await intake.take_in(Body(body), any_dialect=True) == take_in(
            Body(body), SETTINGS, any_dialect=True
        )
        wrong = json.dumps(LARGE | {"questions": {"q": NOUL, "p": {"type": "x"}}}).encode()
        with pytest.raises(InvalidQuestion) as caught:
            await intake.take_in(Body(wrong))
        assert caught.value.field == "questions.p.type"
        assert caught.value.details["errors"][0]["pointer"] == "/questions/p/type"
        with pytest.raises(DuplicateKey):
            await intake.take_in(Body(b'{"model":"m","model":"m","state":"' + b"x" * 70_000 + b'"}'))


@pytest.mark.anyio
async def test_a_process_that_is_killed_is_replaced(started):
    with contextlib.closing(Intake(SETTINGS)) as intake:
        body = json.dumps(LARGE).encode()
        before = await intake.take_in(Body(body))
        killed = started()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert await intake.take_in(Body(body)) == before
        present = started()
        assert set(present) - set(killed)
        assert len(present) == 1, "those that ended are gone"
    assert not any(is_alive(pid) for pid in present), "who closes waits for the end"


@pytest.mark.anyio
@pytest.mark.parametrize("replaced", [False, True])
async def test_a_process_that_is_starting_ends_with_the_intake(started, replaced):
    """It stands still as soon as it is there: so it is as slow as any host could make it."""
    intake = Intake(SETTINGS)
    body = Body(json.dumps(LARGE).encode())
    if replaced:
        await intake.take_in(body)
        [killed] = started()
        os.kill(killed, signal.SIGKILL)
        assert ends(killed)
    waiting = asyncio.create_task(intake.take_in(body))
    deadline = time.monotonic() + 60
    while not (starting := [pid for pid in started() if is_alive(pid)]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0)
    os.kill(starting[0], signal.SIGSTOP)
    intake.close()
    assert not is_alive(starting[0])
    with pytest.raises(ShuttingDown):
        await waiting
    with pytest.raises(ShuttingDown):
        await intake.take_in(body)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_they_end_with_the_api(how, start_api):
    api = start_api()
    assert api.call("POST", "/v1/jobs", json.dumps(LARGE))[0] == 202
    readers = children(api.process.pid)
    assert readers
    api.process.send_signal(how)
    assert all(ends(pid, 30) for pid in (api.process.pid, *readers))
    assert "resource_tracker" not in api.logged(), "nothing that the kernel keeps is left behind"
