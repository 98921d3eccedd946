"""A Redis master that dies under Sentinel: its replica takes over, and API and workers follow."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, closing, suppress

import pytest
import redis

from d3serve.up.broker import find_server

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


def free_port():
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Watched:
    """A master, a replica that keeps up with it, and one sentinel that watches both."""

    def __init__(self, folder, stack):
        self._folder, self._stack = folder, stack
        self.master_port, replica_port, sentinel_port = free_port(), free_port(), free_port()
        self.sentinel_port = sentinel_port
        self.url = f"sentinel://127.0.0.1:{sentinel_port}/main"
        self.master = self._start("master", self.master_port, [])
        self._start("replica", replica_port, ["--replicaof", f"127.0.0.1 {self.master_port}"])
        self._until(replica_port, lambda client: client.info("replication")["master_link_status"] == "up")
        conf = folder / "sentinel.conf"
        conf.write_text(
            f"port {sentinel_port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {self.master_port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 5000\n"
        )
        self._run("sentinel", [str(conf), "--sentinel"])
        self._until(sentinel_port, lambda client: client.sentinel_master("main")["num-slaves"] == 1)

    def _start(self, name, port, more):
        (self._folder / name).mkdir()
        flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder / name)]
        return self._run(name, [*flags, *more])

    def _run(self, name, arguments):
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        process = self._stack.enter_context(
            subprocess.Popen([find_server(), *arguments], stdout=log, stderr=log)
        )
        self._stack.callback(process.kill)
        return process

    def _until(self, port, holds):
        deadline = time.monotonic() + 60
        with redis.Redis(port=port, decode_responses=True) as client:
            while time.monotonic() < deadline:
                with suppress(redis.RedisError, KeyError):
                    if holds(client):
                        return
                time.sleep(0.05)
        raise AssertionError(f"the server at {port} is not what was waited for")


@pytest.fixture
def watched(tmp_path):
    with ExitStack() as stack:
        yield Watched(tmp_path, stack)


@pytest.fixture
def redis_url(watched):
    return watched.url


def killed(watched):
    os.kill(watched.master.pid, signal.SIGKILL)


def planned(watched):
    """As for maintenance: the master lives on as a replica, and unblocks who waits on it with an error."""
    with redis.Redis(port=watched.sentinel_port) as sentinel:
        sentinel.execute_command("SENTINEL", "FAILOVER", "main")


@pytest.mark.parametrize("failover", [killed, planned])
async def test_a_failover_is_followed_and_no_replicated_job_is_lost(service, watched, failover):
    with redis.Redis(port=watched.master_port) as master:
        ids = await service.submit_many((f"state {i}" for i in range(50)), wake=False)
        assert master.wait(1, 2_000) == 1  # the replica has them
    worker = service.start_worker("question_ms=10", max_batch_questions=4)
    await service.ready()
    await service.running(ids[0])
    failover(watched)
    jobs = await service.finish_all(ids)
    assert {job.status for job in jobs} == {"succeeded"}
    async with asyncio.timeout(90):
        job_id = await service.submit("after the failover")
        assert (await service.finish(job_id)).status == "succeeded"
    assert worker.alive()
