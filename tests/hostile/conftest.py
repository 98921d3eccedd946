"""A real API process on a real broker, its memory, and a probe that notices when others have to wait."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from d3serve.settings import Settings
from d3serve.up.supervisor import listening

READY_WITHIN_S = 60


@dataclass
class Api:
    """An API process: where it listens, what it takes."""

    port: int
    process: subprocess.Popen
    log: Path
    settings: Settings

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def memory_bytes(self, what="VmRSS"):
        """What the process holds now; `VmHWM` is the most that it ever held."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what))

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def logged(self):
        return self.log.read_text()

    def call(self, method, path, body=None, timeout=60, **headers):
        """One request on a connection of its own; status, headers and body of the answer."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as http_:
            http_.request(method, path, body, {n.replace("_", "-"): v for n, v in headers.items()})
            answer = http_.getresponse()
            return answer.status, answer.headers, answer.read()


@pytest.fixture
def start_api(redis_url, raw_redis, tmp_path):  # noqa: ARG001 - the server is emptied first
    """Starts `d3serve api` with the settings given, ready to be called; ends it with the test."""
    started = []

    def start(before=(), **settings):
        made = Settings(redis_url=redis_url, log_level="warning", **settings)
        log = tmp_path / f"api-{len(started)}.log"
        with listening("127.0.0.1", 0, 1) as (listener,), log.open("wb") as sink:
            number = listener.fileno()
            command = [*before, sys.executable, "-m", "d3serve", "api", "--fd", str(number)]
            process = subprocess.Popen(
                command, env=os.environ | made.to_env(), stderr=sink, pass_fds=(number,)
            )
            api = Api(listener.getsockname()[1], process, log, made)
        started.append(api)
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if api.call("GET", "/healthz", timeout=2)[0] == 200:
                    return api
            assert process.poll() is None, api.logged()
            time.sleep(0.05)
        raise AssertionError("the API does not answer")

    yield start
    for api in started:
        api.process.terminate()
        try:
            api.process.wait(20)
        except subprocess.TimeoutExpired:
            api.process.kill()
            api.process.wait()


@dataclass
class Probe:
    """Asks for something every 50 ms, as an honest caller would, in a process of its own: how long each answer took."""

    api: Api
    path: str = "/healthz"
    every_s: float = 0.05
    took_s: list = field(default_factory=list)
    failures: list = field(default_factory=list)

    def __enter__(self):
        script = Path(__file__).with_name("probe.py")
        command = [sys.executable, script, str(self.api.port), self.path, str(self.every_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_):
        told, _ = self._process.communicate()
        found = json.loads(told)
        self.took_s += found["took_s"]
        self.failures += found["failures"]

    def percentile(self, share):
        ordered = sorted(self.took_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def __str__(self):
        return (
            f"{len(self.took_s)} probes of {self.path}: p50 {self.percentile(0.5) * 1000:.0f} ms, "
            f"p99 {self.percentile(0.99) * 1000:.0f} ms, worst {max(self.took_s) * 1000:.0f} ms, "
            f"{len(self.failures)} failures"
        )


@pytest.fixture
def probing():
    return Probe
