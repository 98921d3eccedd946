"""Large states on a real API process that is killed while it takes them, and on a worker that cannot find one."""

import asyncio
import os
import subprocess
import sys
import time

import httpx
import pytest

from d3serve.api.app import create_app
from d3serve.schemas import JobError
from d3serve.store import states
from d3serve.store.encode import decode_state
from d3serve.store.jobs import JobStore
from d3serve.store.turns import TurnStore
from d3serve.up.supervisor import bind

pytestmark = pytest.mark.anyio
QUESTIONS = {"q": {"type": "noul", "instructions": "x"}}


def state_of(number):
    return f"{number}: " + "the parcel came late. " * 15_000


@pytest.fixture
def folder(settings, tmp_path):
    return settings.model_copy(
        update={"state_dir": tmp_path / "states", "log_level": "warning", "max_batch_tokens": 10**8}
    )


@pytest.fixture
def api_process(folder):
    """An API process and its address."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("D3SERVE_")}
    with bind("127.0.0.1", 0) as listener:
        command = [sys.executable, "-m", "d3serve", "api", "--fd", str(listener.fileno())]
        process = subprocess.Popen(command, env=env | folder.to_env(), pass_fds=[listener.fileno()])
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield process, address  # the port is the child's alone: nobody waits for it once it is killed
    process.kill()
    process.wait()


async def test_no_accepted_state_is_lost_when_the_api_is_killed_and_no_file_stays_behind(folder, api_process):
    process, address = api_process
    accepted = {}

    async def submit(client, number):
        body = {"model": "jev-latest", "state": state_of(number), "questions": QUESTIONS}
        answer = await client.post("/v1/jobs", json=body)
        assert answer.status_code == 202
        accepted[answer.json()["id"]] = number
        if len(accepted) == 12:
            process.kill()

    few = httpx.Limits(max_connections=8)  # so that most have yet to be sent when the process is killed
    async with httpx.AsyncClient(base_url=address, timeout=30, limits=few) as client:
        ended = await asyncio.gather(*(submit(client, n) for n in range(40)), return_exceptions=True)
    assert all(isinstance(error, httpx.TransportError) for error in ended if error is not None)
    assert 12 <= len(accepted) < 40

    worker = TurnStore.open(folder, "hand:1")
    found, groups = {}, set()
    while (turn := worker.claim(1)).jobs:
        found |= {job.id: job.state for job in turn.jobs}
        groups |= {job.group for job in turn.jobs}
        for job in turn.jobs:
            worker.fail(turn.lease, job.id, JobError(code="device_error", message="x"))  # keeps its state
        worker.free(turn.lease, "back")
    worker.close()
    for job_id, number in accepted.items():
        assert decode_state(found[job_id]) == state_of(number)

    files = [path for path in folder.state_dir.rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, (0, time.time() - states.GRACE_S - 1))
    async with JobStore.open(folder) as store:
        await store.sweep()
    assert {path.name.partition(".")[0] for path in files if path.exists()} == groups


async def test_every_api_process_and_worker_of_one_folder_sees_the_same_state(folder, serving):
    body = {"model": "jev-latest", "state": state_of(1), "questions": QUESTIONS}
    with serving(create_app(folder)) as first, serving(create_app(folder)) as second:
        for address in (first, second):
            async with httpx.AsyncClient(base_url=address, timeout=30) as client:
                assert (await client.post("/v1/jobs", json=body)).status_code == 202
    assert sum(path.is_file() for path in folder.state_dir.rglob("*")) == 1
    worker = TurnStore.open(folder, "hand:1")
    assert [decode_state(job.state) == state_of(1) for job in worker.claim(1).jobs] == [True, True]
    worker.close()


async def test_who_writes_to_redis_gets_no_files_of_the_api(folder, api_process, raw_redis, tmp_path):
    """The same attacks on the store itself: tests/store/test_states.py."""
    body = {"model": "jev-latest", "state": state_of(1), "questions": QUESTIONS}
    async with httpx.AsyncClient(base_url=api_process[1], timeout=30) as client:
        assert (await client.post("/v1/jobs", json=body)).status_code == 202
        [name] = raw_redis.keys("*:st:*")
        raw_redis.set(name, "@../../planted 5")
        assert (await client.post("/v1/jobs", json=body)).status_code == 202
    assert [path.name for path in tmp_path.parent.rglob("planted*")] == []
    worker = TurnStore.open(folder, "hand:1")
    assert [job.state for job in worker.claim(1).jobs] == [None, None]
    worker.close()


async def test_a_forged_folder_of_states_refuses_large_states_alone(api_process, raw_redis):
    raw_redis.set("d3:{default}:folder", "../../elsewhere")
    large = {"model": "jev-latest", "state": state_of(1), "questions": QUESTIONS}
    async with httpx.AsyncClient(base_url=api_process[1], timeout=30) as client:
        refused = await client.post("/v1/jobs", json=large)
        assert (refused.status_code, refused.json()["code"]) == (503, "storage_unavailable")
        assert (await client.post("/v1/jobs", json=large | {"state": "small"})).status_code == 202
