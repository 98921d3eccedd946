"""Batches while everything around them is killed, and the largest there may be."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from d3serve.store.files import MAX_FILE_BYTES
from d3serve.up.broker import EmbeddedBroker
from d3serve.up.supervisor import bind

pytestmark = [pytest.mark.anyio, pytest.mark.faults, pytest.mark.slow]
ENDED = ("completed", "failed", "expired", "cancelled")
# A short lease, and more attempts than kills: a job whose worker was killed goes first, and meets the next kill too.
FEEDER = (
    "import sys, d3serve.api.batch_feeder as feeder, d3serve.store.encode as encode\n"
    "feeder.LEASE_S, encode.MAX_ATTEMPTS = 2, 50\n"
    "from d3serve.api.batch_main import batches_main\n"
    "from d3serve.settings import Settings\n"
    "sys.exit(batches_main(Settings.load()))\n"
)


@pytest.fixture
def broker(tmp_path):
    started = EmbeddedBroker(tmp_path / "own-broker", 2**31).start()
    yield started
    started.stop()


@pytest.fixture
def redis_url(broker):
    return broker.url


class Part:
    """A process that can be killed and started again."""

    def __init__(self, settings, arguments, fd=None):
        env = {name: value for name, value in os.environ.items() if not name.startswith("D3SERVE_")}
        self._start = lambda: subprocess.Popen(
            [sys.executable, "-P", *arguments], env=env | settings.to_env(), pass_fds=[fd] if fd else [],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.process = self._start()

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def restart(self):
        self.kill()
        self.process = self._start()


def peak_mb(pid):
    """The most memory that a process has held, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return round(int(line.split()[1]) * 1024 / 1e6)


@pytest.fixture
def parts(service, tmp_path):
    """An API, two feeders, and the address; the port stays when the API is killed."""
    service.settings = service.settings.model_copy(
        update={"state_dir": tmp_path / "states", "model": "fake:", "log_level": "warning"}
    )
    with bind("127.0.0.1", 0) as listener:
        fd = listener.fileno()
        api = Part(service.settings, ["-m", "d3serve", "api", "--fd", str(fd)], fd)
        feeders = [Part(service.settings, ["-c", FEEDER]) for _ in range(2)]
        yield api, feeders, f"http://127.0.0.1:{listener.getsockname()[1]}"
        for part in (api, *feeders):
            part.kill()


@pytest.fixture
async def client(parts):
    async with openai.AsyncOpenAI(
        api_key="any", base_url=f"{parts[2]}/v1", max_retries=0, timeout=600
    ) as asked:
        yield asked


def line_of(number, text="", lines_a_state=1):
    asked = [{"type": "predicate", "name": "net", "instructions": "Does it need a network?"}]
    body = {"model": "fake", "input": f"state {number // lines_a_state} {text}", "questions": asked}
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/decisions", "body": body})


async def ended(client, batch, within_s):
    """The batch once it has ended, though the API is away now and then."""
    async with asyncio.timeout(within_s):
        while True:
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
                found = await client.batches.retrieve(batch.id)
                if found.status in ENDED:
                    return found
            await asyncio.sleep(0.1)


async def custom_ids(client, file_id):
    content = await client.files.content(file_id)
    return [json.loads(line)["custom_id"] for line in content.content.splitlines()]


@pytest.mark.timeout(900)
async def test_thirty_kills_of_anything_lose_and_double_no_line(service, parts, client, broker):
    api, feeders, _ = parts
    lines, chance = 2_000, random.Random(18)  # noqa: S311 # chance, not secrecy
    engine = {"model": "question_ms=15", "max_batch_questions": 16}  # 15 s of work for two
    for _ in range(2):
        service.start_worker(**engine)
    await service.ready(2)
    data = "\n".join(map(line_of, range(lines))).encode()
    file = await client.files.create(file=("a.jsonl", data), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/decisions", completion_window="24h"
    )
    for number in range(30):
        await asyncio.sleep(chance.uniform(0.0, 0.4))
        victim = (
            "broker" if number % 10 == 5 else chance.choice(["api", "feeder", "feeder", "worker", "child"])
        )
        if victim == "api":
            api.restart()
        elif victim == "feeder":
            chance.choice(feeders).restart()
        elif victim == "broker":
            os.kill(broker.pid, signal.SIGKILL)
            await asyncio.to_thread(broker.stop)
            await asyncio.to_thread(broker.start)
        else:
            worker, child = await service.at_work()
            if victim == "child":
                os.kill(child, signal.SIGKILL)
            else:
                worker.kill()
                service.start_worker(**engine)
    done = await ended(client, batch, 600)
    assert (done.status, done.error_file_id) == ("completed", None)
    assert (done.request_counts.total, done.request_counts.completed) == (lines, lines)
    ids = await custom_ids(client, done.output_file_id)
    assert len(ids) == lines
    assert set(ids) == {f"line-{number}" for number in range(lines)}
    await service.settled()
    assert await service.finished() == {"succeeded": lines}


@pytest.mark.timeout(1_800)
async def test_the_largest_batch_takes_minutes_and_no_more_memory_than_a_small_one(
    service, parts, client, tmp_path
):
    api, feeders, address = parts
    lines, path = 50_000, tmp_path / "requests.jsonl"
    text = "the parcel came late " * 180
    with path.open("w") as file:
        for number in range(lines):
            file.write(line_of(number, text, lines_a_state=25) + "\n")  # the lane takes a state a turn
    assert 0.98 * MAX_FILE_BYTES < path.stat().st_size <= MAX_FILE_BYTES
    workers = [service.start_worker("question_ms=0", max_batch_tokens=2**18) for _ in range(2)]
    await service.ready(2)
    with path.open("rb") as data:
        files = {"file": ("requests.jsonl", data)}
        uploaded = await asyncio.to_thread(
            httpx.post, f"{address}/v1/files", data={"purpose": "batch"}, files=files, timeout=600
        )
    assert uploaded.status_code == 200, uploaded.text
    batch = await client.batches.create(
        input_file_id=uploaded.json()["id"], endpoint="/v1/decisions", completion_window="24h"
    )
    done = await ended(client, batch, 1_500)
    counts = done.request_counts
    took_s = done.completed_at - done.created_at
    peaks = [peak_mb(part.process.pid) for part in (api, *feeders)]
    peaks += [peak_mb(pid) for one in workers for pid in (one.pid, service.child(one))]
    broker_mb = round(service.redis.info("memory")["used_memory_peak"] / 1e6)
    print(f"\n{lines:,} lines in {took_s} s; peaks in MB: broker {broker_mb}; API, two feeders, "  # noqa: T201
          f"two workers and their children {peaks}")  # fmt: skip
    assert (done.status, counts.completed, counts.failed) == ("completed", lines, 0)
    ids = await custom_ids(client, done.output_file_id)
    assert len(ids) == len(set(ids)) == lines
    assert max(peaks[:3]) < 300, "the file was held whole"
    assert broker_mb < 300, "the batch was held in Redis"
