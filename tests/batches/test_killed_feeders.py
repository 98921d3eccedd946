"""A feeder ends in the middle of a step, wherever that is: the next one loses and doubles no line."""

import contextlib

import pytest

from d3serve.errors import StorageUnavailable
from d3serve.store.batches import BatchStore
from d3serve.store.jobs import JobStore
from d3serve.store.pieces import Pieces

pytestmark = pytest.mark.anyio


class Killed(BaseException):
    """Ends a feeder where it stands."""


@pytest.fixture
def kill_at(monkeypatch):
    """The next call of a method ends the feeder, before it does anything or after."""

    def arm(owner, name, *, after, error=Killed):
        whole = getattr(owner, name)

        async def ends(self, *args, **options):
            monkeypatch.setattr(owner, name, whole)
            if after:
                await whole(self, *args, **options)
            raise error

        monkeypatch.setattr(owner, name, ends)

    return arm


@pytest.fixture
def work(let_claims_run_out, worker, monkeypatch):
    """What a feeder does in so many steps, each as soon as it may, beside a worker that answers what there is."""
    monkeypatch.setattr("d3serve.api.batch_feeder.WINDOW", 16)

    async def run(feeder, steps):
        for _ in range(steps):
            let_claims_run_out()
            await feeder.work()
            worker.work()

    return run


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (JobStore, "submit", False),
        (JobStore, "submit", True),
        (BatchStore, "step", False),
        (BatchStore, "step", True),
        (BatchStore, "erase_jobs", False),
    ],
)
@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_a_feeder_that_is_killed_loses_and_doubles_no_line(
    batches, decisions, make_feeder, work, kill_at, table, owner, name, after, steps
):
    feeder = await make_feeder()
    batch = await batches.start(decisions(60))
    await work(feeder, steps)
    kill_at(owner, name, after=after)
    with pytest.raises(Killed):
        await work(feeder, 4)
    another = await make_feeder()
    done = await batches.until(batch, work=lambda: work(another, 1))
    assert (done.request_counts.completed, done.request_counts.failed) == (60, 0)
    assert await batches.outcomes(done) == sorted(f"line-{number}" for number in range(60))
    finished = await table._table.send("hgetall", table._table.key("finished"))
    assert finished == {"succeeded": "60"}, "a line was computed twice"


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (BatchStore, "claim", True),
        (BatchStore, "in_flight", False),
        (BatchStore, "statuses", False),
        (BatchStore, "jobs", True),
        (JobStore, "submit", False),
        (JobStore, "submit", True),
        (JobStore, "models", False),
        (BatchStore, "step", False),
        (BatchStore, "step", True),
        (BatchStore, "erase_jobs", True),
        (Pieces, "get", False),
    ],
)
async def test_a_job_table_that_cannot_serve_now_costs_no_line(
    batches, decisions, make_feeder, work, kill_at, owner, name, after, monkeypatch
):
    monkeypatch.setattr("d3serve.api.served.REFRESH_S", 0.0)
    feeder = await make_feeder()
    batch = await batches.start(decisions(24))
    await work(feeder, 1 if owner is not Pieces else 0)
    kill_at(owner, name, after=after, error=StorageUnavailable("not now"))
    with contextlib.suppress(StorageUnavailable):  # `run` waits a little, and goes on
        await work(feeder, 4)
    done = await batches.until(batch, work=lambda: work(feeder, 1))
    assert (done.request_counts.completed, done.request_counts.failed) == (24, 0)
    assert await batches.outcomes(done) == sorted(f"line-{number}" for number in range(24))
