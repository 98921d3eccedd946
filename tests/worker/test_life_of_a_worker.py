"""Workers that start, stop, crash and fail to load."""

import os
import signal

import pytest
from processes import ends

pytestmark = pytest.mark.anyio


async def test_a_lost_wake_is_sent_again(service):
    service.start_worker()
    await service.ready()
    job_id = await service.submit("s", wake=False)
    assert (await service.finish(job_id)).status == "succeeded"


async def test_a_killed_child_does_not_wait_for_its_lease_to_run_out(service):
    worker = service.start_worker("state_ms=1000", lease_s=600)
    await service.ready()
    job_id = await service.submit("s")
    await service.running(job_id)
    os.kill(service.child(worker), signal.SIGKILL)
    job = await service.finish(job_id)
    assert (job.status, job.attempt) == ("succeeded", 2)


async def test_a_killed_worker_leaves_its_jobs_to_another(service):
    service.start_worker("state_ms=1000")
    await service.ready()
    ids = [await service.submit(f"s{i}") for i in range(3)]
    await service.running(ids[0])
    child = service.child(service.workers[0])
    service.workers[0].signal(signal.SIGKILL)
    assert ends(child), "the child outlived its worker"
    service.start_worker()
    jobs = await service.finish_all(ids)
    assert {job.status for job in jobs} == {"succeeded"}
    await service.settled()
    assert (await service.jobs.stats()).finished == {"succeeded": 3}


async def test_a_poison_job_fails_after_three_attempts_and_its_mates_are_answered(service):
    poison = await service.submit("same fake:kill", wake=False)
    mates = [await service.submit("same", wake=False) for _ in range(3)]
    service.start_worker()
    jobs = await service.finish_all(mates)
    assert {job.status for job in jobs} == {"succeeded"}
    dead = await service.finish(poison)
    assert (dead.status, dead.error.code, dead.attempt) == ("failed", "max_attempts", 3)


async def test_a_lost_device_replaces_the_child(service):
    worker = service.start_worker()
    await service.ready()
    before = service.child(worker)
    bad = await service.submit("fake:device-error")
    assert (await service.finish(bad)).error.code == "max_attempts"
    assert (await service.finish(await service.submit("after"))).status == "succeeded"
    assert service.child(worker) != before
    assert worker.alive()


async def test_a_model_that_cannot_be_read_ends_the_worker_after_three_loads(service):
    worker = service.start_worker("load_error=disk")
    job_id = await service.submit("s")
    assert worker.wait() == 70
    assert len(await worker.events("model.load_failed")) == 3
    assert await worker.events("model.gave_up")
    job = await service.jobs.get(job_id, "me")
    assert (job.status, job.attempt) == ("queued", 0)


async def test_a_model_that_cannot_be_served_ends_the_worker_at_once(service):
    worker = service.start_worker("load_error=checkpoint")
    assert worker.wait() == 70
    (event,) = await worker.events("model.load_failed")
    assert event["reason"]
    assert "Traceback" not in worker.log.read_text()


async def test_a_worker_that_loads_is_not_ready_yet(service):
    service.start_worker("load_s=2")
    job_id = await service.submit("s")
    while not (workers := await service.jobs.workers()):
        assert (await service.jobs.wait(job_id, "me", 0.1)).status == "queued"
    assert not workers[0].ready
    assert await service.jobs.models() == []
    await service.finish(job_id)
    assert [model.name for model in await service.jobs.models()] == ["fake"]


async def test_sigterm_finishes_the_turn_and_leaves(service):
    worker = service.start_worker("state_ms=1500")
    await service.ready()
    job_id = await service.submit("s")
    await service.running(job_id)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    job = await service.jobs.get(job_id, "me")
    assert (job.status, job.attempt) == ("succeeded", 1)
    assert await service.jobs.workers() == []


LONG = "x" * 40_000  # 10,000 tokens


async def told_to_stop(service, seconds, **changes):
    """A worker that was told to stop a second into a pass of so many; itself and the job."""
    worker = service.start_worker(f"ktoken_ms={100 * seconds}&yield_ms=10", **changes)
    await service.ready()
    job_id = await service.submit(LONG)
    await service.told(job_id)
    worker.signal(signal.SIGTERM)
    return worker, job_id


async def test_a_long_pass_that_ends_within_the_grace_is_finished(service):
    worker, job_id = await told_to_stop(service, 4, stop_grace_s=60)
    assert worker.wait(60) == 0
    job = await service.jobs.get(job_id, "me")
    assert (job.status, job.attempt) == ("succeeded", 1)
    [said] = await worker.events("stop.finishes")
    assert 0 < said["eta_s"] <= said["left_s"] <= 60


async def test_a_long_pass_that_would_outlast_the_grace_is_given_back_at_once_and_unharmed(service):
    worker, job_id = await told_to_stop(service, 300, stop_grace_s=40)
    assert worker.wait(30) == 0, "it waited for the end of the grace"
    job = await service.jobs.get(job_id, "me")
    assert (job.status, job.attempt) == ("queued", 0)
    assert len(await worker.events("stop.gives_back")) == 1
    service.start_worker()
    job = await service.finish(job_id)
    assert (job.status, job.attempt) == ("succeeded", 1)


async def test_a_job_of_many_passes_begins_none_when_the_grace_is_over(service):
    """Passes that do not yield, fifteen of a second each."""
    worker = service.start_worker("question_ms=250", stop_grace_s=2, max_batch_questions=4)
    await service.ready()
    job_id = await service.submit("s", questions=60)
    await service.running(job_id)
    worker.signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    job = await service.jobs.get(job_id, "me")
    assert (job.status, job.attempt) == ("queued", 0)
    assert len(service.passes()) < 14


async def test_a_worker_that_is_told_to_stop_takes_no_new_work(service):
    worker, job_id = await told_to_stop(service, 5, stop_grace_s=60)
    await worker.events("stop.finishes")
    short, late = await service.submit("short"), await service.submit(LONG, questions=2)
    assert worker.wait(60) == 0
    assert (await service.jobs.get(job_id, "me")).status == "succeeded"
    for waits in (short, late):
        assert (await service.jobs.get(waits, "me")).status == "queued"


async def test_sigquit_gives_the_turn_back(service):
    worker = service.start_worker("state_ms=60000")
    await service.ready()
    job_id = await service.submit("s")
    await service.running(job_id)
    worker.signal(signal.SIGQUIT)
    worker.wait()
    job = await service.jobs.get(job_id, "me")
    assert (job.status, job.attempt) == ("queued", 0)


HEARS_LATE = """
import threading
from celery.worker.request import Request

def late(self, *told, on_accepted=Request.on_accepted):
    threading.Timer(2, on_accepted, (self, *told)).start()

Request.on_accepted = late
"""


async def test_sigquit_gives_back_a_turn_of_which_the_main_process_has_not_heard_yet(service):
    worker = service.start_worker("state_ms=30000", prelude=HEARS_LATE)
    await service.ready()
    job_id = await service.submit("s")
    await service.running(job_id)
    worker.signal(signal.SIGQUIT)
    worker.signal(signal.SIGQUIT)  # who is impatient cuts nothing short
    worker.wait()
    assert "Initiating Soft Shutdown" in worker.log.read_text()
    job = await service.jobs.get(job_id, "me")
    assert (job.status, job.attempt) == ("queued", 0)


async def test_sigquit_ends_an_idle_worker_at_once(service):
    worker = service.start_worker()
    await service.ready()
    worker.signal(signal.SIGQUIT)
    worker.wait()
    assert "Initiating Soft Shutdown" not in worker.log.read_text()


async def test_a_stuck_turn_is_cut_off(service):
    service.start_worker(turn_limit_s=2)
    job_id = await service.submit("fake:sleep=60")
    mate = await service.submit("fine")
    dead = await service.finish(job_id)
    assert (dead.error.code, dead.attempt) == ("max_attempts", 3)
    assert (await service.finish(mate)).status == "succeeded"


async def test_a_worker_beside_other_celery_projects_does_its_own_work(service):
    nobodys = dict.fromkeys(("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL"), "redis://127.0.0.1:1/0")
    modules = {"CELERY_CONFIG_MODULE": "shop.celeryconfig", "CELERY_LOADER": "shop.loader"}
    environ = nobodys | modules | {"DJANGO_SETTINGS_MODULE": "shop.settings"}
    worker = service.start_worker(environ=environ)
    await service.ready()
    assert (await service.finish(await service.submit("s"))).status == "succeeded"
    os.kill(service.child(worker), signal.SIGKILL)  # a replacement has the same environment
    assert (await service.finish(await service.submit("again"))).status == "succeeded"


async def test_a_log_that_cannot_be_written_costs_nothing_but_its_lines(service):
    worker = service.start_worker(stderr="/dev/full")
    await service.ready()
    assert (await service.finish(await service.submit("s"))).status == "succeeded"
    os.kill(service.child(worker), signal.SIGKILL)
    assert (await service.finish(await service.submit("again"))).status == "succeeded"
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
