"""Large states as files beside Redis: written before their jobs, read exactly, removed when nobody needs them."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from d3serve.errors import QueueFull, StorageUnavailable
from d3serve.schemas import JobError
from d3serve.store import encode, states
from d3serve.store.jobs import JobStore
from d3serve.store.limits import Limits

pytestmark = pytest.mark.anyio
LARGE = 'parcel é 😀 " \\ \n ' * 20_000
BROKEN = JobError(code="device_error", message="x")


@dataclass
class Shelf:
    """A job table whose large states lie in a folder."""

    table: object
    jobs: JobStore
    root: Path

    async def submit(self, state=LARGE, *, tenant="me", key=None, **options):
        request = self.make_request(state, ("q",), **options)
        return (await self.jobs.submit(request, tenant=tenant, idempotency_key=key)).job_id

    def worker(self, **changes):
        return self.table.worker(**{"state_dir": self.root, "max_batch_tokens": 10**7} | changes)

    def files(self):
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    def age(self):
        """Make every file old enough to be looked at."""
        for path in self.files():
            os.utime(path, (0, time.time() - states.GRACE_S - 1))

    async def sweep(self):
        self.jobs._states._sweep_at = 0.0
        await self.jobs.sweep()


@pytest.fixture
async def shelf(table, tmp_path, make_request):
    root = tmp_path / "states"
    settings = table.settings.model_copy(update={"state_dir": root})
    Shelf.make_request = staticmethod(make_request)
    async with JobStore(table.jobs._table.client, settings) as jobs:
        yield Shelf(table, jobs, root)


async def test_a_large_state_is_a_file_and_reaches_the_worker_as_it_was_sent(shelf):
    await shelf.submit()
    [path] = shelf.files()
    assert path.stat().st_mode & 0o777 == 0o600
    stored = [shelf.table.redis.get(name) for name in shelf.table.redis.keys("*:st:*")]
    assert [len(text) < 200 for text in stored] == [True]
    [job] = shelf.worker().claim(1).jobs
    assert job.state == encode.encode_state(LARGE).decode()


async def test_a_small_state_is_no_file(shelf):
    await shelf.submit("small")
    assert shelf.files() == []
    assert shelf.worker().claim(1).jobs[0].state == "=small"


async def test_without_a_folder_redis_holds_large_states_and_gets_each_once(table, make_request, monkeypatch):
    sent = []
    run = table.jobs._table.run

    async def watched(name, *args):
        if name == "submit":
            sent.append(len(args[4]))
        return await run(name, *args)

    monkeypatch.setattr(table.jobs._table, "run", watched)
    for _ in range(3):
        await table.jobs.submit(make_request(LARGE, ("q",)), tenant="me")
    assert [size > 0 for size in sent] == [True, False, False]
    assert {job.state for job in table.worker(max_batch_tokens=10**7).claim(1).jobs} == {
        encode.encode_state(LARGE).decode()
    }


async def test_a_file_lives_as_long_as_the_last_job_that_needs_it(shelf, make_response):
    for _ in range(2):
        await shelf.submit()
    assert len(shelf.files()) == 1
    worker = shelf.worker(max_kept_bytes_per_tenant=0)
    turn = worker.claim(1)
    for job in turn.jobs:
        shelf.age()
        await shelf.sweep()
        assert len(shelf.files()) == 1
        worker.succeed(turn.lease, job.id, make_response())
    await shelf.sweep()
    assert shelf.files() == []


async def test_a_failed_job_keeps_its_file_for_a_retry_and_a_deleted_one_does_not(shelf):
    job_id = await shelf.submit()
    worker = shelf.worker()
    turn = worker.claim(1)
    worker.fail(turn.lease, job_id, BROKEN)
    worker.free(turn.lease, "back")
    shelf.age()
    await shelf.sweep()
    await shelf.jobs.retry(job_id, "me")
    turn = worker.claim(1)
    assert turn.jobs[0].state is not None
    worker.fail(turn.lease, job_id, BROKEN)
    await shelf.jobs.delete(job_id, "me")
    await shelf.sweep()
    assert shelf.files() == []


async def test_what_a_killed_process_left_behind_is_removed_but_not_while_its_job_may_still_come(shelf):
    folder = await shelf.jobs._states._folder_name()
    shelf.jobs._states._files.write(folder, "0" * 40, b'"orphan"')
    await shelf.sweep()
    assert len(shelf.files()) == 1
    shelf.age()
    await shelf.sweep()
    assert shelf.files() == []


async def test_a_host_whose_clock_is_an_hour_ahead_removes_no_file_of_a_job_to_come(shelf, monkeypatch):
    folder = await shelf.jobs._states._folder_name()
    shelf.jobs._states._files.write(folder, "0" * 40, b'"its job comes in a moment"')
    now = time.time()
    monkeypatch.setattr(states.time, "time", lambda: now + 3_600)
    await shelf.sweep()
    assert len(shelf.files()) == 1


async def test_a_queue_does_not_sweep_the_files_of_another(shelf):
    other = shelf.root / "other-queue" / f"{'0' * 40}.aa"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"theirs")
    shelf.age()
    await shelf.sweep()
    assert other.exists()


async def test_fifty_submits_of_one_state_at_once_leave_one_file(shelf):
    await asyncio.gather(*(shelf.submit() for _ in range(50)))
    assert len(shelf.files()) == 1
    jobs = shelf.worker().claim(1).jobs
    assert len(jobs) == 50
    assert None not in {job.state for job in jobs}


async def test_tenants_share_no_file(shelf):
    mine, theirs = await shelf.submit(tenant="me"), await shelf.submit(tenant="you")
    assert len(shelf.files()) == 2
    await shelf.jobs.delete(mine, "me")
    shelf.age()
    await shelf.sweep()
    [job] = shelf.worker().claim(1).jobs
    assert (job.id, job.state is not None) == (theirs, True)


async def test_a_replayed_submit_writes_nothing(shelf, make_response):
    first = await shelf.submit(key="k")
    worker = shelf.worker(max_kept_bytes_per_tenant=0)
    worker.succeed(worker.claim(1).lease, first, make_response())
    shelf.age()
    await shelf.sweep()
    assert await shelf.submit(key="k") == first
    assert shelf.files() == []


async def test_a_refused_submit_leaves_no_file(shelf, monkeypatch):
    monkeypatch.setattr(Limits, "queued_bytes", 2**18)
    with pytest.raises(QueueFull):
        await shelf.submit()
    assert shelf.files() == []


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b'"cut')])
async def test_a_lost_file_is_noticed_by_the_worker_and_mended_by_the_next_submit(shelf, damage):
    await shelf.submit()
    [path] = shelf.files()
    damage(path)
    worker = shelf.worker()
    turn = worker.claim(1)
    assert [job.state for job in turn.jobs] == [None]
    worker.free(turn.lease, "back")
    await shelf.submit()
    assert shelf.files() == [path]
    assert {job.state for job in worker.claim(1).jobs} == {encode.encode_state(LARGE).decode()}


async def test_a_lost_file_is_there_again_before_the_job_that_needs_it(shelf, monkeypatch):
    await shelf.submit()
    [path] = shelf.files()
    path.unlink()
    run, there = shelf.jobs._table.run, []

    async def watched(name, *args):
        if name == "submit":
            there.append(path.exists())
        return await run(name, *args)

    monkeypatch.setattr(shelf.jobs._table, "run", watched)
    await shelf.submit()
    assert there == [True]


async def test_a_state_that_goes_between_looking_and_submitting_is_written_again(shelf, monkeypatch):
    first = await shelf.submit()
    stored = shelf.jobs._states._stored

    async def late(groups):
        kept = await stored(groups)
        await shelf.jobs.delete(first, "me")
        return kept

    monkeypatch.setattr(shelf.jobs._states, "_stored", late)
    await shelf.submit()
    [job] = shelf.worker().claim(1).jobs
    assert job.state == encode.encode_state(LARGE).decode()


async def test_a_worker_without_the_folder_says_so_and_does_not_crash(shelf):
    await shelf.submit()
    assert [job.state for job in shelf.worker(state_dir=None).claim(1).jobs] == [None]


async def test_a_folder_that_cannot_be_written_to_refuses_the_job(shelf):
    shelf.root.write_text("a file where the folder should be")
    with pytest.raises(StorageUnavailable, match="cannot be stored"):
        await shelf.submit()
    assert shelf.worker().claim(1).jobs == []


async def test_a_disk_that_fills_up_leaves_no_piece_of_a_state(shelf, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(states.os, "fsync", full)
    with pytest.raises(StorageUnavailable, match="No space left"):
        await shelf.submit()
    assert shelf.files() == []


NAME = f"{'0' * 40}.{'0' * 16}"
FORGED = [  # FOLDER: the queue's own
    "@../victim/file 6",
    "@FOLDER/../../victim/file 6",
    f"@FOLDER/{NAME}/../../../victim/file 6",
    f"@../victim/{NAME} 6",
    "@/etc/hostname 6",
    "@VICTIM 6",
    f"@FOLDER/{NAME}",
    f"@FOLDER/{NAME} -1",
    f"@FOLDER/{NAME} 6\n",
    f"@FOLDER/{NAME} ٦",
    "@",
]


def victim_of(shelf):
    """A file beside the folder of states, which nobody who writes to Redis may have read, written or removed."""
    victim = shelf.root.parent / "victim" / "file"
    victim.parent.mkdir(exist_ok=True)
    for path in (victim, victim.with_name(NAME)):
        path.write_text("secret")
        os.utime(path, (0, 0))
    return victim


@pytest.mark.parametrize("reference", FORGED)
async def test_a_forged_reference_is_neither_read_nor_written_nor_removed(shelf, reference):
    victim = victim_of(shelf)
    await shelf.submit()
    [name] = shelf.table.redis.keys("*:st:*")
    folder = await shelf.jobs._states._folder_name()
    forged = reference.replace("FOLDER", folder).replace("VICTIM", str(victim))
    shelf.table.redis.set(name, forged)
    everything = sorted(shelf.root.parent.rglob("*"))
    await shelf.submit()
    worker = shelf.worker()
    turn = worker.claim(1)
    assert [job.state for job in turn.jobs] == [None, None]
    assert sorted(shelf.root.parent.rglob("*")) == everything
    shelf.age()
    await shelf.sweep()
    assert victim.read_text() == "secret"


@pytest.mark.parametrize(
    "name", ["../victim", "/etc", ".", "", "0" * 15, "0" * 17, "G" * 16, "0" * 16 + "\n"]
)
async def test_a_forged_folder_is_neither_written_to_nor_swept(shelf, name):
    victim = victim_of(shelf)
    shelf.table.redis.set(shelf.table.key("folder"), name)
    with pytest.raises(StorageUnavailable, match="folder of states that d3serve never made"):
        await shelf.submit()
    with pytest.raises(StorageUnavailable):
        await shelf.sweep()
    assert victim.read_text() == "secret"
    assert shelf.files() == []


async def test_a_link_in_the_folder_is_not_followed(shelf):
    victim = victim_of(shelf)
    await shelf.submit()
    [path] = shelf.files()
    victim.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(victim)
    assert [job.state for job in shelf.worker().claim(1).jobs] == [None]


async def test_the_sweep_leaves_files_that_are_not_ours_and_takes_what_a_killed_mend_left(shelf):
    await shelf.submit()
    [path] = shelf.files()
    note, spare = path.with_name("notes.txt"), path.with_name(f"{path.name}.{'0' * 8}")
    note.write_text("kept")
    spare.write_text("left")
    shelf.age()
    await shelf.sweep()
    assert sorted(shelf.files()) == sorted([path, note])


class TestBroken:
    """The same guarantees on code without the line that gives each: every one of these must fail."""

    pytestmark = pytest.mark.xfail(strict=True)

    async def test_files_that_are_needed_stay(self, shelf, make_response, monkeypatch):
        monkeypatch.setattr(states, "group_of", lambda _: "another")
        await test_a_file_lives_as_long_as_the_last_job_that_needs_it(shelf, make_response)

    async def test_young_files_stay(self, shelf, monkeypatch):
        monkeypatch.setattr(states, "GRACE_S", -60.0)
        await test_what_a_killed_process_left_behind_is_removed_but_not_while_its_job_may_still_come(shelf)

    async def test_lost_files_are_mended(self, shelf, monkeypatch):
        monkeypatch.setattr(states.StateFolder, "holds", lambda *_: True)
        await test_a_lost_file_is_noticed_by_the_worker_and_mended_by_the_next_submit(shelf, Path.unlink)

    async def test_pieces_are_noticed(self, shelf, monkeypatch):
        monkeypatch.setattr(states, "_size", lambda _: 4)
        await test_a_lost_file_is_noticed_by_the_worker_and_mended_by_the_next_submit(
            shelf, lambda path: path.write_bytes(b'"cut')
        )

    async def test_losers_of_a_race_clean_up(self, shelf, monkeypatch):
        monkeypatch.setattr(states.StateFolder, "remove", lambda *_: None)
        await test_fifty_submits_of_one_state_at_once_leave_one_file(shelf)
