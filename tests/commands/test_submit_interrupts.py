"""`d3serve submit` interrupted: what is left running is said, and canceled on wish."""

import contextlib
import json
import os
import signal
import subprocess

from submissions import NOUL, command, jobs_made, run, until

from d3serve.client import Client


def test_an_interrupt_says_what_is_left_and_the_next_run_finds_it(good, service, worker, take_turns):
    process = subprocess.Popen(command(good, service), stderr=subprocess.PIPE, text=True)
    until(lambda: jobs_made(worker) == 3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped: 0 of 3 lines have an outcome" in said
    assert "; 3 jobs run on at the server; the same command goes on from here" in said
    assert "Traceback" not in said
    with take_turns():
        assert run(good, service) == 0
    assert jobs_made(worker) == 3


def test_an_interrupt_waits_for_no_file_that_cannot_be_read_yet(good, service):
    """A network drive or a name server that does not answer held the command, and a second interrupt did not help."""
    stalled = good[0].parent / "stalled.png"
    os.mkfifo(stalled)
    good[0].write_text(json.dumps({"state": "x", "images": [stalled.name], "questions": {"q": NOUL}}))
    process = subprocess.Popen(command(good, service), stderr=subprocess.PIPE, text=True)
    writer = []

    def is_being_read():
        with contextlib.suppress(OSError):  # until the other end is open
            writer.append(os.open(stalled, os.O_WRONLY | os.O_NONBLOCK))
        return writer

    try:
        until(is_being_read)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        for descriptor in writer:
            os.close(descriptor)
    assert process.returncode == 130
    assert "stopped: 0 of 1 lines have an outcome" in said
    assert "Traceback" not in said


def test_an_interrupt_cancels_what_it_leaves_on_wish(good, service, worker, take_turns):
    more = ("--cancel-on-interrupt",)
    with subprocess.Popen(command(good, service, *more), stderr=subprocess.PIPE, text=True) as process:
        until(lambda: jobs_made(worker) == 3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    with Client(service) as client:
        states = {job.status for job in client.list().jobs}
    assert states == {"canceled"}
    assert "stopped: 0 of 3 lines have an outcome" in said
    assert "; 3 jobs were canceled; the same command goes on from here" in said
    with take_turns():
        assert run(good, service) == 0, "without --retry-failed: they have no outcome"
    assert jobs_made(worker) == 3
