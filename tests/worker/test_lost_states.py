"""A large state whose file is gone: its job fails in words, its neighbours do not, and sending it again mends it."""

import pytest
from processes import ends

from d3serve.store.jobs import JobStore

pytestmark = pytest.mark.anyio
LARGE = "the parcel came late. " * 15_000


@pytest.fixture
async def filed(service, tmp_path):
    """The service with a folder of states; a job's state lies there."""
    root = tmp_path / "states"
    service.settings = service.settings.model_copy(update={"state_dir": root})
    async with JobStore.open(service.settings) as jobs:
        service.jobs = jobs
        service.files = lambda: [path for path in root.rglob("*") if path.is_file()]
        yield service


async def test_a_large_state_is_answered_from_its_file(filed):
    job_id = await filed.submit(LARGE)
    assert len(filed.files()) == 1
    filed.start_worker()
    assert (await filed.finish(job_id)).status == "succeeded"


async def test_a_lost_state_fails_its_job_at_once_and_sending_it_again_mends_it(filed):
    lost = await filed.submit(LARGE)
    near = await filed.submit("small")
    for path in filed.files():
        path.unlink()
    worker = filed.start_worker()
    failed, answered = await filed.finish_all([lost, near])
    assert answered.status == "succeeded"
    assert (failed.status, failed.attempt, failed.error.code) == ("failed", 1, "state_lost")
    assert failed.error.retryable
    assert await worker.events("state.lost")
    again = await filed.submit(LARGE)
    assert (await filed.finish(again)).status == "succeeded"
    await filed.jobs.retry(lost, "me")
    assert (await filed.finish(lost)).status == "succeeded"
    assert worker.alive()


async def test_a_worker_that_has_no_folder_fails_the_job_and_says_what_it_needs(filed):
    job_id = await filed.submit(LARGE)
    worker = filed.start_worker(state_dir=None)
    job = await filed.finish(job_id)
    assert (job.status, job.attempt, job.error.code) == ("failed", 1, "state_lost")
    [event] = await worker.events("state.folder_unset")
    assert "D3SERVE_STATE_DIR" in event["need"]


async def test_a_worker_killed_in_a_turn_leaves_the_state_to_the_next(filed):
    job_id = await filed.submit(f"fake:sleep=2 {LARGE}")
    first = filed.start_worker(lease_s=1.5)
    await filed.running(job_id)
    child = filed.child(first)
    first.kill()
    assert ends(child)
    filed.start_worker(lease_s=1.5)
    job = await filed.finish(job_id)
    assert (job.status, job.attempt) == ("succeeded", 2)
