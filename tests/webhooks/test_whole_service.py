"""The commands themselves, each a process of its own: two APIs on a port, a worker, the sender, real clients."""

import os
import subprocess
import sys
import time

import httpx
import pytest
from typesafe_sdk import Noul, TypeSafeClient

from d3serve.client import Client, verify_webhook
from d3serve.up.supervisor import bind

QUESTIONS = {f"q{i}": {"type": "noul", "instructions": f"Is it {i}?"} for i in range(3)}


class Service:
    """The processes, by name, and the address of the API."""

    def __init__(self, settings, listener):
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("D3SERVE_")}
        self._env |= settings.model_copy(update={"model": "fake:", "log_level": "warning"}).to_env()
        self.processes = {}
        for name in ("first api", "second api"):
            self._start(name, "api", "--fd", str(listener.fileno()), pass_fds=(listener.fileno(),))
        self._start("worker", "worker")
        self._start("sender", "webhooks")

    def _start(self, name, *command, pass_fds=()):
        command = [sys.executable, "-m", "d3serve", *command]
        self.processes[name] = subprocess.Popen(command, env=self._env, pass_fds=pass_fds)

    def wait_until_ready(self):
        deadline = time.monotonic() + 90
        while not self._is_ready():
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in self.processes.values())
            time.sleep(0.1)

    def _is_ready(self):
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2).is_success
        except httpx.TransportError:
            return False

    def stop(self):
        for process in self.processes.values():
            process.terminate()
        return {name: process.wait(timeout=60) for name, process in self.processes.items()}


@pytest.fixture
def running(settings):
    with bind("127.0.0.1", 0) as listener:
        started = Service(settings, listener)
        try:
            started.wait_until_ready()
            yield started
        finally:
            codes = started.stop()
    assert set(codes.values()) <= {0, -9, -15}, codes  # uvicorn repeats the signal once it has shut down


def test_sdk_client_and_webhook_and_the_loss_of_an_api_process(running, make_receiver):
    receiver = make_receiver()
    with TypeSafeClient(api_key="any", base_url=running.url) as sdk:
        answer = sdk.system_one(state="hello", questions={"spam": Noul(instructions="Is it spam?")})
        assert 0 <= answer.nouls["spam"].noul <= 1
    with Client(running.url) as client:
        secret = httpx.get(f"{running.url}/v1/webhook-secret").json()["secret"]
        job = client.submit("hello", QUESTIONS, job={"webhook": {"url": receiver.url}})
        assert [event.name for event in client.events(job.id)].count("answer") == len(QUESTIONS)
        done = client.wait(job.id)
        assert list(done.result["answers"]) == list(QUESTIONS)
        (got,) = receiver.wait_for(1)
        verify_webhook(got.headers, got.body, secret)
        assert got.event["data"]["result"] == done.result

        ids = []
        for number in range(30):
            if number == 10:
                running.processes["first api"].kill()
            ids.append(client.submit(f"state {number % 7}", QUESTIONS).id)
        assert {client.wait(job_id, timeout_s=90).status for job_id in ids} == {"succeeded"}
        assert {one.id for one in client.list(limit=100).jobs} >= set(ids)
        assert len(client.list(limit=100).jobs) == len(ids) + 2, "trying again made a second job"
