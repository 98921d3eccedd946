"""Over a hundred files that nobody means well with: each is refused or read, and costs nothing else."""

import os
import socket
import threading
from collections import Counter

import pytest
from hostile_files import EITHER, READ, REFUSED, hostile_files

from d3serve.errors import InvalidMedia
from d3serve.media.headers import read_header
from d3serve.worker.media_decoder import MediaDecoder

MOST_MB = 700  # of the process that decodes, at any time; 230 here


@pytest.fixture
def server():
    """A server, and who called."""
    callers = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    callers.append(listening.accept()[1])
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield "{}:{}".format(*listening.getsockname()), callers
        listening.shutdown(socket.SHUT_RDWR)


def most_mb(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) // 1024


def test_a_hostile_file_costs_nobody_anything(tmp_path, server):
    address, callers = server
    secret = tmp_path / "secret"
    os.mkfifo(secret)  # whoever opens it waits for ever, and would be told that it took too long
    files = hostile_files(str(secret), address)
    assert len(files) >= 100
    decoder, outcomes, wrong, pids = MediaDecoder(), Counter(), [], set()
    try:
        for name, kind, data, expected in files:
            known = decoder.begin(kind, name, lambda data=data: data)
            try:
                known.result(timeout=200)
                outcome, told = READ, ""
            except InvalidMedia as error:
                outcome, told = REFUSED, error.message
            outcomes[outcome] += 1
            pids.add(decoder._process.pid)
            if (
                expected not in (EITHER, outcome)
                or len(told) > 200
                or "longer than" in told
                or "process" in told
            ):
                wrong.append((name, outcome, told))
        assert not wrong
        [pid] = pids
        assert outcomes[READ] >= 10
        assert outcomes[REFUSED] >= 60
        assert most_mb(pid) < MOST_MB
        numbers = os.listdir(f"/proc/{pid}/fd")
        links = {os.readlink(f"/proc/{pid}/fd/{number}").partition(":")[0] for number in numbers}
        assert links <= {"/dev/null", "socket", "/memfd"}
    finally:
        decoder.close()
    assert not callers


def test_whoever_reads_a_header_alone_raises_nothing_else():
    """The API reads headers of strangers' files in its own process."""
    for name, kind, data, expected in hostile_files("/secret", "127.0.0.1:1"):
        for part in (data, data[:24], data[: len(data) // 3]):
            told = ""
            try:
                assert read_header(part, kind).most_tokens < 3300, name
            except InvalidMedia as error:
                told = error.message
            assert len(told) < 200, name
            assert not told or part is not data or expected != READ, name
