"""Two revisions of one model side by side in one queue, as in every rolling upgrade, with real workers over HTTP."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from safetensors.torch import load_file, save_file

from d3serve.settings import Settings
from d3serve.up.supervisor import listening

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
CALLS = 40
OLD, NEW = "tiny@aaa", "tiny@bbb"
WITHIN_S = 120


@pytest.fixture
def folders(tiny_checkpoint, tmp_path):
    """Two packages of one name; the newer one's weights answer otherwise."""
    made = {name: tmp_path / name[-3:] / "tiny" for name in (OLD, NEW)}
    for folder in made.values():
        shutil.copytree(tiny_checkpoint, folder)
    readout = made[NEW] / "readout.safetensors"
    save_file({name: -tensor for name, tensor in load_file(readout).items()}, readout)
    return made


class Service:
    """An API and its workers, each a process of its own."""

    def __init__(self, redis_url, folders):
        self._base = Settings(redis_url=redis_url, log_level="warning")
        self._folders = folders
        self._processes = []
        with listening("127.0.0.1", 0, 1) as (listener,):
            number = listener.fileno()
            self._start(NEW, "api", "--fd", str(number), pass_fds=(number,))
            self.client = httpx.Client(
                base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=WITHIN_S
            )

    def _start(self, name, *command, **options):
        settings = self._base.model_copy(
            update={"model": str(self._folders[name]), "revision": name[-3:], "device": "cpu"}
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "d3serve", *command], env=os.environ | settings.to_env(), **options
        )
        self._processes.append(process)
        return process

    def start_worker(self, name):
        return self._start(name, "worker")

    def serves(self, *names):
        """Wait until these are the models that are served."""
        deadline = time.monotonic() + WITHIN_S
        while (served := self._served()) != set(names):
            assert time.monotonic() < deadline, served
            time.sleep(0.1)

    def _served(self):
        return {f"{one['name']}@{one['revision']}" for one in self.client.get("/v1/models").json()["models"]}

    def ask(self, model, number):
        """One synchronous call; who answered, and what."""
        questions = {"spam": {"type": "noul", "instructions": "Is it spam?"}}
        body = {"model": model, "state": f"a letter, the {number}th", "questions": questions}
        answer = self.client.post("/v1/systemone", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["model"], answer.json()["answers"]["spam"]["noul"]

    def submit(self, model, number):
        """One job; its address."""
        questions = {"spam": {"type": "noul", "instructions": "Is it spam?"}}
        body = {"model": model, "state": f"a job, the {number}th", "questions": questions}
        answer = self.client.post("/v1/jobs", json=body)
        assert answer.status_code == 202, answer.text
        return answer.headers["location"]

    def result(self, location):
        """Who answered a job, once it is done."""
        deadline = time.monotonic() + WITHIN_S
        while not (job := self.client.get(location, params={"wait": 10}).json())["done"]:
            assert time.monotonic() < deadline, job
        assert job["status"] == "succeeded", job
        return self.client.get(f"{location}/result").json()["model"]

    def close(self):
        self.client.close()
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def service(redis_url, raw_redis, folders):  # noqa: ARG001 - the server is emptied first
    with contextlib.closing(Service(redis_url, folders)) as made:
        yield made


def test_a_rolling_upgrade(service):
    old = service.start_worker(OLD)
    service.start_worker(NEW)
    service.serves(OLD, NEW)
    numbers = range(CALLS)
    with ThreadPoolExecutor(12) as pool:
        asked = {
            model: [pool.submit(service.ask, model, number) for number in numbers]
            for model in (OLD, NEW, "tiny")
        }
        answers = {model: [one.result() for one in given] for model, given in asked.items()}
    for model in (OLD, NEW):
        assert {who for who, _ in answers[model]} == {model}, "a call that names a revision runs on it"
    said = {model: [what for _, what in answers[model]] for model in (OLD, NEW)}
    assert all(old != new for old, new in zip(said[OLD], said[NEW], strict=True)), "by its weights"
    for number, (who, what) in enumerate(answers["tiny"]):
        assert what == pytest.approx(said[who][number], abs=1e-5), "whoever answers says who it is"

    jobs = {model: [service.submit(model, number) for number in numbers] for model in (OLD, NEW, "tiny")}
    old.send_signal(signal.SIGTERM)
    assert old.wait(60) == 0
    service.serves(NEW)
    assert {service.result(job) for job in jobs[NEW]} == {NEW}
    assert {service.result(job) for job in jobs["tiny"]} <= {OLD, NEW}
    body = {"model": OLD, "state": "s", "questions": {"q": {"type": "noul", "instructions": "So?"}}}
    for path in ("/v1/jobs", "/v1/systemone"):
        refused = service.client.post(path, json=body)
        assert refused.status_code == 404, refused.text
        assert OLD in refused.text
        assert NEW in refused.text, "there is another"
    service.start_worker(OLD)
    assert {service.result(job) for job in jobs[OLD]} == {OLD}, "who named it waited for it"
