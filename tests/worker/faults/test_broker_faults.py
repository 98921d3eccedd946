"""A broker that dies, falls silent or is full: nothing accepted is lost, and everybody comes back by himself."""

import asyncio
import os
import signal
import time

import pytest
from redis.exceptions import OutOfMemoryError

from d3serve.errors import StorageUnavailable
from d3serve.schemas import DecisionRequest
from d3serve.schemas.questions import NoulQuestion
from d3serve.store.jobs import JobStore
from d3serve.up.broker import EmbeddedBroker

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


@pytest.fixture
def broker(tmp_path):
    started = EmbeddedBroker(tmp_path / "own-broker", 2**26).start()
    yield started
    started.stop()


@pytest.fixture
def redis_url(broker):
    return broker.url


async def kill_and_restart(broker):
    os.kill(broker.pid, signal.SIGKILL)
    await asyncio.to_thread(broker.stop)
    await asyncio.sleep(0.5)  # the outage
    await asyncio.to_thread(broker.start)


@pytest.mark.parametrize("busy", [True, False])
async def test_a_killed_broker_comes_back_with_every_job(service, broker, busy):
    service.start_worker("question_ms=20", max_batch_questions=8)
    await service.ready()
    ids = await service.submit_many(f"state {i % 20}" for i in range(100)) if busy else []
    if busy:
        await service.running(ids[90])
    await kill_and_restart(broker)
    began = time.monotonic()
    ids.append(await service.submit("after the restart"))
    jobs = await service.finish_all(ids)
    assert {job.status for job in jobs} == {"succeeded"}
    assert time.monotonic() - began < 60
    await service.settled()
    assert await service.finished() == {"succeeded": len(ids)}


@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_a_long_pass_goes_on_while_the_broker_is_away(service, broker, fault):
    """It stays away until the pass has ended: who waited for it would wait for ever."""
    service.start_worker("ktoken_ms=250&yield_ms=10", lease_s=600)
    await service.ready()
    long = await service.submit("x" * 40_000)  # 10,000 tokens
    await service.told(long)
    assert service.passes() == []
    os.kill(broker.pid, signal.SIGSTOP if fault == "frozen" else signal.SIGKILL)
    async with asyncio.timeout(15):
        while not service.passes():  # noqa: ASYNC110 # in a file
            await asyncio.sleep(0.02)
    if fault == "frozen":
        os.kill(broker.pid, signal.SIGCONT)
    else:
        await asyncio.to_thread(broker.stop)
        await asyncio.to_thread(broker.start)
    job = await service.finish(long)
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert len(service.passes()) == 1


async def test_a_killed_broker_comes_back_with_its_references_to_files(service, broker, tmp_path):
    service.settings = service.settings.model_copy(update={"state_dir": tmp_path / "states"})
    async with JobStore.open(service.settings) as service.jobs:
        ids = await service.submit_many(f"{i} " + "the parcel came late. " * 15_000 for i in range(12))
        await kill_and_restart(broker)
        service.start_worker()
        assert {job.status for job in await service.finish_all(ids)} == {"succeeded"}


async def test_killed_connections_of_everybody_cost_no_job_and_no_second_run(service):
    """celery/celery#8030: a worker whose connection was reset stayed connected and consumed nothing."""
    service.start_worker("question_ms=20", max_batch_questions=8)
    await service.ready()
    ids = await service.submit_many(f"state {i % 20}" for i in range(100))
    for place in (0, 6, 12):  # the group of a state ends together, with 14 or more still to come
        await service.finish(ids[place])
        for kind in ("normal", "pubsub"):
            service.redis.client_kill_filter(_type=kind, skipme=True)
    ids.append(await service.submit("after the last one"))
    jobs = await service.finish_all(ids)
    assert {job.status for job in jobs} == {"succeeded"}
    await service.settled()
    assert await service.finished() == {"succeeded": len(ids)}


async def test_waiters_survive_a_restart(service, broker):
    job_id = await service.submit("s", wake=False)
    waiting = asyncio.create_task(service.finish(job_id))
    await asyncio.sleep(0.1)
    await kill_and_restart(broker)
    service.start_worker()
    assert (await waiting).status == "succeeded"


class Proxy:
    """A TCP road to the broker's socket that can swallow everything without closing anything."""

    def __init__(self, socket_path):
        self._path = socket_path
        self._open = asyncio.Event()
        self._open.set()
        self._blind = set()
        self._pipes = set()
        self._writers = []
        self._server = None

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    @property
    def url(self):
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def black_hole(self):
        """Every connection that exists now is dead from now on, and neither side hears of it."""
        self._blind = set(self._pipes)

    async def _connect(self, reader, writer):
        far_reader, far_writer = await asyncio.open_unix_connection(self._path)
        self._writers += [writer, far_writer]
        for source, target in ((reader, far_writer), (far_reader, writer)):
            pipe = asyncio.create_task(self._pump(source, target))
            self._pipes.add(pipe)

    async def _pump(self, source, target):
        me = asyncio.current_task()
        while data := await source.read(65536):
            if me in self._blind:
                await asyncio.Event().wait()
            target.write(data)
        if me not in self._blind:
            target.close()


async def test_a_half_open_connection_loses_no_job(service, broker):
    async with Proxy(broker.socket) as proxy:
        service.start_worker("question_ms=5", redis_url=proxy.url)
        await service.ready()
        await service.finish(await service.submit("before"))
        proxy.black_hole()
        began = time.monotonic()
        ids = await service.submit_many(f"state {i}" for i in range(20))
        jobs = await service.finish_all(ids)
        assert {(job.status, job.attempt) for job in jobs} == {("succeeded", 1)}
        assert time.monotonic() - began < 60
        assert await service.finished() == {"succeeded": 21}


async def test_a_connection_that_dies_in_mid_turn_loses_no_job(service, broker):
    async with Proxy(broker.socket) as proxy:
        service.start_worker("state_ms=500", redis_url=proxy.url, lease_s=30)
        await service.ready()
        ids = await service.submit_many(["one", "two"])
        await service.running(ids[0])
        proxy.black_hole()
        jobs = await service.finish_all(ids)
        assert {(job.status, job.attempt) for job in jobs} == {("succeeded", 1)}
        assert await service.finished() == {"succeeded": 2}


async def fill(service):
    """Submit large jobs until one is refused; the accepted ones."""
    accepted = []
    for i in range(2_000):
        service.jobs._memory._until = 0.0  # look each time, not once a second
        try:
            accepted.append(await service.submit(f"{i} " + "x" * 20_000, wake=False))
        except StorageUnavailable:
            return accepted
    raise AssertionError("nothing was refused")


def limit_memory(service, more_bytes):
    service.redis.config_set("maxmemory", service.redis.info("memory")["used_memory"] + more_bytes)


async def test_a_filling_redis_refuses_new_jobs_and_finishes_the_old_ones(service):
    limit_memory(service, 16 * 2**20)
    accepted = await fill(service)
    service.start_worker()
    jobs = await service.finish_all(accepted)
    assert {job.status for job in jobs} == {"succeeded"}
    service.jobs._memory._until = 0.0
    assert (await service.finish(await service.submit("room again"))).status == "succeeded"


async def test_a_full_redis_keeps_every_job_and_still_takes_the_running_ones_result(service, tmp_path):
    go_on = tmp_path / "go-on"
    os.mkfifo(go_on)
    service.start_worker()
    await service.ready()
    running = await service.submit(f"fake:read={go_on}")
    await service.running(running)
    service.jobs._memory._used_share = nothing_used  # the guard sees nothing: Redis itself must refuse
    limit_memory(service, 2 * 2**20)
    accepted = await fill(service)
    with pytest.raises(OutOfMemoryError):
        service.redis.set("another", "x" * 50_000)
    assert len(service.redis.keys(service.key("st", "*"))) == len(accepted) + 1  # no half-written job
    await asyncio.to_thread(go_on.write_text, "")
    assert (await service.finish(running)).status == "succeeded"
    limit_memory(service, 16 * 2**20)
    service.start_worker()
    jobs = await service.finish_all(accepted)
    assert {job.status for job in jobs} == {"succeeded"}


async def stuff(service):
    """Leave Redis no room at all, whoever has just given some back."""
    service.redis.config_set("maxmemory", service.redis.info("memory")["used_memory"] - 2**19)
    with pytest.raises(OutOfMemoryError):
        service.redis.set("another", "x")


async def test_a_worker_that_lives_empties_a_queue_that_fills_redis(service):
    """What its turns leave behind may fill Redis; what wakes it for the next one must not be what fails then."""
    worker = service.start_worker("question_ms=50", max_batch_questions=2)
    await service.ready()
    ids = await service.submit_many(f"state {i} " + "x" * 5_000 for i in range(40))
    await service.running(ids[20])
    await stuff(service)
    jobs = await service.finish_all(ids)
    assert {(job.status, job.attempt) for job in jobs} == {("succeeded", 1)}
    assert worker.alive()
    assert [one.ready for one in await service.jobs.workers()] == [True]


async def test_a_worker_that_starts_empties_a_queue_that_fills_redis(service):
    ids = await service.submit_many(f"state {i} " + "x" * 5_000 for i in range(40))
    service.redis.delete(service.key("mq", "interactive"))  # and nothing has woken it yet
    await stuff(service)
    worker = service.start_worker("question_ms=20", max_batch_questions=2)
    jobs = await service.finish_all(ids)
    assert {(job.status, job.attempt) for job in jobs} == {("succeeded", 1)}
    assert worker.alive()


async def nothing_used():
    return 0.0


async def test_parallel_submits_from_two_processes_make_one_job(service):
    request = DecisionRequest(model="fake", state="s", questions={"q": NoulQuestion(type="noul")})
    async with JobStore.open(service.settings) as other:
        calls = [
            store.submit(request, tenant="me", idempotency_key="k", fingerprint="f")
            for store in (service.jobs, other)
            for _ in range(25)
        ]
        answers = await asyncio.gather(*calls)
    assert len({answer.job_id for answer in answers}) == 1
    assert sum(answer.created for answer in answers) == 1


async def test_submits_answer_503_while_redis_is_away_and_work_again_after(service, broker):
    await asyncio.to_thread(broker.stop)
    with pytest.raises(StorageUnavailable):
        await service.submit("s")
    await asyncio.to_thread(broker.start)
    service.start_worker()
    assert (await service.finish(await service.submit("s"))).status == "succeeded"
