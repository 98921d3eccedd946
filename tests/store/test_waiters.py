"""Many who wait for one job cost as much as one, and hear of its end like one."""

import asyncio
import contextlib

import pytest

from d3serve.errors import JobNotFound
from d3serve.store import waiters

pytestmark = pytest.mark.anyio
MANY = 20


async def _watched(table, job_id):
    return [job.status async for job in table.jobs.watch(job_id, "me")]


@pytest.fixture
def looks(table, monkeypatch):
    """What was read for all waiters of a job together, and a way to wait for the next such look."""
    read, made = table.jobs._read_whole, asyncio.Queue()

    async def counted(job_id, tenant):
        job = await read(job_id, tenant)
        if tenant is None:
            made.put_nowait(job)
        return job

    monkeypatch.setattr(table.jobs, "_read_whole", counted)
    return made


async def test_a_job_is_read_once_for_all_who_wait_for_it(table, looks, make_response, monkeypatch):
    """Three thousand streams of one queued job read it three thousand times a second: others waited 11 s."""
    monkeypatch.setattr(waiters, "REREAD_S", 0.2)
    job_id = await table.submit()
    waiting = [asyncio.create_task(table.jobs.wait(job_id, "me", 60)) for _ in range(MANY)]
    waiting += [asyncio.create_task(_watched(table, job_id)) for _ in range(MANY)]
    async with asyncio.timeout(30):
        for _ in range(5):
            await looks.get()
    assert looks.qsize() < 5, "each waiter looks"
    worker = table.worker()
    assert worker.succeed(worker.claim(1).lease, job_id, make_response())
    async with asyncio.timeout(30):
        ended = await asyncio.gather(*waiting)
    assert {job.status for job in ended[:MANY]} == {"succeeded"}
    assert {statuses[-1] for statuses in ended[MANY:]} == {"succeeded"}
    assert table.jobs._dispatcher._watches == {}


async def test_a_stranger_who_waits_learns_nothing_and_spoils_nothing(table, make_response):
    job_id = await table.submit()
    for held in (table.jobs.wait(job_id, "stranger", 5), anext(table.jobs.watch(job_id, "stranger"))):
        with pytest.raises(JobNotFound):
            await held
    mine = asyncio.create_task(table.jobs.wait(job_id, "me", 30))
    with pytest.raises(JobNotFound):
        await table.jobs.wait(job_id, "stranger", 5)
    worker = table.worker()
    assert worker.succeed(worker.claim(1).lease, job_id, make_response())
    assert (await mine).status == "succeeded"


async def test_a_lost_word_is_made_up_for_by_looking(table, make_response, monkeypatch):
    monkeypatch.setattr(table.jobs._dispatcher, "_tell", lambda _message: None)
    job_id = await table.submit()
    waiting = asyncio.create_task(table.jobs.wait(job_id, "me", 60))
    stream = asyncio.create_task(_watched(table, job_id))
    await asyncio.sleep(0.1)
    worker = table.worker()
    assert worker.succeed(worker.claim(1).lease, job_id, make_response())
    async with asyncio.timeout(20):
        assert (await waiting).status == "succeeded"
        assert (await stream)[-1] == "succeeded"


async def test_a_watch_ends_though_its_cancellation_is_lost(monkeypatch):
    """redis-py swallows one that meets it while it connects: the watch read a job for nobody, for ever."""
    monkeypatch.setattr(waiters, "REREAD_S", 0.01)
    reading, lost = asyncio.Event(), asyncio.Event()

    async def read():
        reading.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost.set()
        raise JobNotFound("job_x")

    dispatcher = waiters.Dispatcher(None, "channel")
    with dispatcher.register("job_x", read, final_only=True):
        task = dispatcher._watches["job_x"].task
        await asyncio.wait_for(reading.wait(), 10)
    await asyncio.wait({task}, timeout=10)
    assert lost.is_set()
    ended = task.done()
    task.cancel()  # in the wait for the next look
    assert ended


@pytest.mark.parametrize("held", [False, True], ids=["told to end", "still waited for"])
async def test_nothing_is_read_once_the_dispatcher_has_stopped(held, monkeypatch):
    """A read that went on, its cancellation lost, opened a connection that nobody would close."""
    monkeypatch.setattr(waiters, "REREAD_S", 0.01)
    monkeypatch.setattr(waiters, "LEAVE_WITHIN_S", 0.01)
    reading = asyncio.Event()

    async def read():
        reading.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    dispatcher = waiters.Dispatcher(None, "channel")
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(dispatcher.register("job_x", read, final_only=True))
        task = dispatcher._watches["job_x"].task
        await asyncio.wait_for(reading.wait(), 10)
        if not held:
            waiting.close()
        await dispatcher.stop()
        ended = task.done()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert ended
