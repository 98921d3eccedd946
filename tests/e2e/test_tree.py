"""`d3serve up` as a process tree: what it outlives, what ends it, and what it says then."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redis

READY = re.compile(r"d3serve is ready: (http://\S+)")
BODY = {"model": "jev-latest", "state": "s", "questions": {"q": {"type": "noul", "instructions": "so?"}}}


class Up:
    """One `d3serve up` with the fake engine."""

    def __init__(self, folder, log, model="fake:", *options):
        self.folder, self._log = folder, log
        command = [sys.executable, "-m", "d3serve", "up", "--port", "0", "--model", model, *options]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, "--data-dir", str(folder)], stderr=stderr, stdout=subprocess.DEVNULL
            )
        self.url = until(lambda: READY.search(self.log()) or self.process.poll() is not None, 90)[1]

    def log(self):
        return self._log.read_text()

    def broker_pid(self):
        with redis.Redis(unix_socket_path=str(self.folder / "valkey.sock")) as client:
            return client.info("server")["process_id"]

    def answers(self):
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
            return client.post("/v1/systemone", json=BODY).status_code == 200

    def end(self, timeout=60):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


def until(holds, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)
    return found


def descendants(pid):
    """Process ids of all that a process has started, and these in turn."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(child) for listed in lists for child in listed.read_text().split()]
    return own + [other for child in own for other in descendants(child)]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def up(tmp_path):
    with ExitStack() as stack:

        def start(*options):
            tree = Up(tmp_path / "data", tmp_path / "up.log", *options)
            stack.callback(tree.process.wait)
            stack.callback(tree.process.kill)
            return tree

        yield start


def test_a_broker_that_is_killed_comes_back_with_its_jobs(up):
    tree = up()
    with httpx.Client(base_url=tree.url, timeout=30, trust_env=False) as client:
        job = client.post("/v1/jobs", json=BODY).json()["id"]
        client.get(f"/v1/jobs/{job}", params={"wait": 30})
        killed = tree.broker_pid()
        os.kill(killed, signal.SIGKILL)
        until(lambda: client.get("/readyz").status_code == 200 and tree.broker_pid() != killed, 60)
        assert client.get(f"/v1/jobs/{job}").json()["status"] == "succeeded"
    assert tree.answers()
    assert "broker.back" in tree.log()
    assert tree.end() == 0


@pytest.mark.faults
def test_a_broker_that_keeps_dying_ends_the_tree_with_one_line(up):
    tree = up()
    while tree.process.poll() is None:
        try:
            os.kill(tree.broker_pid(), signal.SIGKILL)
        except (redis.RedisError, ProcessLookupError):
            time.sleep(0.05)
    assert tree.process.returncode == 2
    last = tree.log().splitlines()[-1]
    killed_as_it_started = (
        "the embedded broker did not start in" in last
    )  # it answers us before it answers `up`
    assert killed_as_it_started or "the embedded broker died 4 times" in last
    assert "Traceback" not in tree.log()


@pytest.mark.faults
def test_all_end_with_an_up_that_is_killed(up, monkeypatch):
    monkeypatch.setenv("D3SERVE_STOP_GRACE_S", "0")  # and ten seconds to leave
    tree = up("fake:?faults=1")
    with httpx.Client(base_url=tree.url, timeout=30, trust_env=False) as client:
        job = client.post("/v1/jobs", json={**BODY, "state": "fake:sleep=600"}).json()["id"]
        until(lambda: client.get(f"/v1/jobs/{job}").json()["status"] == "running", 60)
    started = descendants(tree.process.pid)
    assert len(started) > 4
    tree.process.kill()
    try:
        until(lambda: not [pid for pid in started if runs(pid)], 60)
    finally:
        for pid in filter(runs, started):
            os.kill(pid, signal.SIGKILL)


def test_the_last_line_names_the_process_that_ended_the_tree(up):
    tree = up()
    children = Path(f"/proc/{tree.process.pid}/task/{tree.process.pid}/children").read_text().split()
    [sender] = [pid for pid in children if b"webhooks" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(sender), signal.SIGKILL)
    assert tree.process.wait(60) == 2
    assert "the webhooks process ended with exit code -9" in tree.log().splitlines()[-1]


def model_of(worker):
    """The process that holds the model of a worker."""

    def found():
        started = [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in descendants(worker)]
        return [pid for pid, command in started if b"spawn_main" in command and runs(pid)]

    return until(found, 60)[0]


@pytest.mark.faults
def test_several_workers_share_the_work_and_one_that_crashes_costs_no_answer(up):
    """Where a model is killed it is loaded again while the other worker answers; a worker that is killed ends all."""
    tree = up("fake:?state_ms=200", "--workers", "2")
    children = Path(f"/proc/{tree.process.pid}/task/{tree.process.pid}/children").read_text().split()
    mains = [int(pid) for pid in children if b"\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(mains) == 2
    with httpx.Client(base_url=tree.url, timeout=60, trust_env=False) as client:

        def answers(round_):
            bodies = [{**BODY, "state": f"{round_} {number}"} for number in range(12)]
            jobs = [client.post("/v1/jobs", json=body).json()["id"] for body in bodies]
            done = [client.get(f"/v1/jobs/{job}", params={"wait": 60}).json() for job in jobs]
            return {job["status"] for job in done} == {"succeeded"}

        assert answers("first")
        workers = client.get("/v1/workers").json()["data"]
        assert [worker["tokens_per_s"] > 0 for worker in workers] == [True, True]
        crashed = model_of(mains[0])
        os.kill(crashed, signal.SIGKILL)
        assert answers("second")
        until(lambda: client.get("/readyz").json().get("workers") == 2, 60)
        assert model_of(mains[0]) != crashed
    os.kill(mains[1], signal.SIGKILL)
    assert tree.process.wait(60) == 2
    assert re.search(r"the worker \d process ended with exit code -9", tree.log().splitlines()[-1])


@pytest.mark.skipif(shutil.which("bash") is None, reason="redirections")
def test_up_runs_with_a_log_that_cannot_be_written(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # a log that cannot be written does not tell which
    command = (
        f"exec {sys.executable} -m d3serve up --port {port} --model fake: --data-dir {tmp_path} 2>/dev/full"
    )
    with subprocess.Popen(["bash", "-c", command]) as process:
        url = f"http://127.0.0.1:{port}"

        def ready():
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
                try:
                    return client.get("/readyz").status_code == 200
                except httpx.TransportError:
                    return process.poll() is not None

        until(ready, 90)
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            statuses = [client.get("/healthz").status_code for _ in range(200)]  # on one connection
        assert statuses == [200] * 200
        process.terminate()
        assert process.wait(60) == 0
