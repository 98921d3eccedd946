"""On a terminal `ask` and `submit` show how far jobs have come, as the server tells; on a pipe they draw nothing."""

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """What a command draws on a terminal of its own."""

    def __init__(self):
        self._ours, self.theirs = pty.openpty()
        self._drawn = ""

    def shows(self, text):
        """Wait until it has drawn `text`."""
        deadline = time.monotonic() + 40
        while text not in self._drawn:
            assert time.monotonic() < deadline, f"no {text!r} in {self._drawn[-2000:]!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self._drawn += ESCAPES.sub("", os.read(self._ours, 65_536).decode())

    def close(self):
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def terminal():
    with contextlib.closing(Terminal()) as opened:
        yield opened


@contextlib.contextmanager
def start(*arguments, stderr):
    env = {n: v for n, v in os.environ.items() if not n.startswith("D3SERVE_")}
    with subprocess.Popen(
        [sys.executable, "-m", "d3serve", *map(str, arguments)], stdout=subprocess.PIPE, stderr=stderr,
        env=env | {"TERM": "xterm", "COLUMNS": "100"},
    ) as command:  # fmt: skip
        try:
            yield command
        finally:
            command.kill()


def claimed(worker, count=1):
    """A turn of so many jobs, once they are there."""
    deadline = time.monotonic() + 40
    while not (turn := worker.claim()).jobs:
        assert time.monotonic() < deadline, "nothing to claim"
        time.sleep(0.02)
    assert len(turn.jobs) == count
    ids = [job.id for job in turn.jobs]
    worker.turns.progress(turn.lease, "deciding", ids)
    return turn, ids


def asked(service):
    return ("ask", "--state", "long", "--yes-no", "y", "--url", service)


@pytest.fixture
def requests(tmp_path):
    path = tmp_path / "requests.jsonl"
    line = {"state": "the same", "questions": {"q": {"type": "noul", "instructions": "x"}}}
    path.write_text(2 * (json.dumps(line) + "\n"))
    return path


def test_ask_shows_the_share_and_the_time_left(service, worker, terminal):
    with start(*asked(service), stderr=terminal.theirs) as command:
        turn, ids = claimed(worker)
        terminal.shows("started")
        for share, eta_s, text in ((0.25, 31.0, "25%, 31 s left"), (0.6, 9.4, "60%, 9 s left")):
            worker.turns.note_share(turn.lease, ids, share, eta_s)
            terminal.shows(text)
        worker.finish(turn)
        out, _ = command.communicate(timeout=60)
        assert command.returncode == 0
        assert b"0.750" in out
        assert b"left" not in out


def test_a_job_that_goes_back_to_the_queue_loses_its_share(service, worker, terminal):
    with start(*asked(service), stderr=terminal.theirs) as command:
        turn, ids = claimed(worker)
        worker.turns.note_share(turn.lease, ids, 0.5, 10)
        terminal.shows("50%, 10 s left")
        worker.turns.free(turn.lease, "back")
        terminal.shows("queued")
        worker.finish(claimed(worker)[0])
        command.communicate(timeout=60)
        assert command.returncode == 0


def test_submit_counts_jobs_and_shows_how_far_those_that_run_have_come(service, worker, terminal, requests):
    files = (requests, "--out", requests.with_name("out"))
    with start("submit", *files, "--at-once", "1", "--url", service, stderr=terminal.theirs) as command:
        turn, ids = claimed(worker)
        terminal.shows("0/2")
        worker.turns.note_share(turn.lease, ids, 0.5, 10)
        terminal.shows("25%")
        worker.finish(turn)
        terminal.shows("1/2")
        worker.finish(claimed(worker)[0])
        terminal.shows("2/2")
        command.communicate(timeout=60)
        assert command.returncode == 0


def test_on_a_pipe_nothing_is_drawn(service, take_turns, requests):
    with take_turns():
        for arguments in (
            asked(service),
            ("submit", requests, "--out", requests.with_name("o"), "--url", service),
        ):
            with start(*arguments, stderr=subprocess.PIPE) as command:
                _, drawn = command.communicate(timeout=60)
                assert command.returncode == 0
                assert re.fullmatch(rb"(2 lines in .* tokens/s\n)?", drawn), "more than a last word"
