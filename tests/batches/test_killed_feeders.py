"""A feeder ends in the middle of a step, wherever that is: the next one loses and doubles no line."""

import pytest

from d3serve.store.batches import BatchStore
from d3serve.store.jobs import JobStore

pytestmark = pytest.mark.anyio
PREFIX = "d3:{default}:"
ENDED = ("completed", "failed")


class Killed(BaseException):
    """Ends a feeder where it stands."""


@pytest.fixture
def kill_at(monkeypatch):
    """The next call of a method ends the feeder, before it does anything or after."""

    def arm(owner, name, *, after=False):
        whole = getattr(owner, name)

        async def ends(self, *args, **options):
            monkeypatch.setattr(owner, name, whole)
            if after:
                await whole(self, *args, **options)
            raise Killed

        monkeypatch.setattr(owner, name, ends)

    return arm


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (JobStore, "submit", False),
        (JobStore, "submit", True),
        (BatchStore, "step", False),
        (BatchStore, "step", True),
        (JobStore, "delete", False),
    ],
)
@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_a_feeder_that_is_killed_loses_and_doubles_no_line(
    batches,
    decisions,
    make_feeder,
    worker,
    kill_at,
    let_claims_run_out,
    raw_redis,
    monkeypatch,
    owner,
    name,
    after,
    steps,
):
    monkeypatch.setattr("d3serve.api.batch_feeder.WINDOW", 16)
    feeder = await make_feeder()
    batch = await batches.start(decisions(40))
    for _ in range(steps):
        await feeder.work()
    worker.work()
    kill_at(owner, name, after=after)
    with pytest.raises(Killed):
        for _ in range(5):
            let_claims_run_out()
            await feeder.work()
            worker.work()
    another = await make_feeder()
    while (done := await batches.client.batches.retrieve(batch.id)).status not in ENDED:
        let_claims_run_out()
        await another.work()
        worker.work()
    assert (done.request_counts.completed, done.request_counts.failed) == (40, 0)
    assert await batches.outcomes(done) == sorted(f"line-{number}" for number in range(40))
    assert sum(map(int, raw_redis.hvals(f"{PREFIX}finished"))) == 40, "a line was computed twice"
