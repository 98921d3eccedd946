"""Any history of calls, in any order: no job is lost or ended twice, no counter drifts, no budget breaks."""

import random

import pytest

from d3serve.errors import D3ServeError
from d3serve.schemas import FINAL_STATUSES, JobError

pytestmark = pytest.mark.anyio
MAX_TOKENS, MAX_QUESTIONS = 400, 6


class History:
    """Random callers on one table; what they were told must agree with what the table says."""

    def __init__(self, table, seed, make_response):
        self.table, self.chance = table, random.Random(seed)  # noqa: S311 # chance, not secrecy
        self.response = make_response
        self.workers = [
            table.worker(f"w{i}", max_batch_tokens=MAX_TOKENS, max_batch_questions=MAX_QUESTIONS)
            for i in range(3)
        ]
        self.turns, self.jobs, self.ended = [], [], {}

    async def submit(self):
        state = f"state {self.chance.randrange(5)} " + "x" * self.chance.choice([0, 400, 3_000])
        options = {
            "lane": self.chance.choice([None, "offline"]),
            "priority": self.chance.choice(["low", "high"]),
        }
        self.jobs.append(await self.table.submit(state, ("a", "b")[: self.chance.randint(1, 2)], **options))

    async def claim(self):
        worker = self.chance.choice(self.workers)
        turn = worker.claim(1)
        if not turn.jobs:
            return
        questions = sum(job.questions.count('"type"') for job in turn.jobs)
        assert questions <= MAX_QUESTIONS or len(turn.jobs) == 1
        held = {
            group
            for other, _ in self.turns
            for group in {job.group for job in other.jobs}
            if self.table.redis.get(self.table.key("own", group)) == other.lease
        }
        assert not held & {job.group for job in turn.jobs}, "two leases hold one state"
        self.turns.append((turn, worker))

    async def more(self):
        for turn, worker in self.some_turn():
            turn.jobs += worker.more(turn.lease)

    async def commit(self):
        for turn, worker in self.some_turn():
            job = self.chance.choice(turn.jobs)
            good = self.chance.random() < 0.7
            accepted = (
                worker.succeed(turn.lease, job.id, self.response())
                if good
                else worker.fail(turn.lease, job.id, JobError(code="internal_error", message="m"))
            )
            if accepted and self.ended.get(job.id, ("", ""))[1] != turn.lease:
                assert job.id not in self.ended, "ended twice"
                self.ended[job.id] = ("succeeded" if good else "failed", turn.lease)

    async def free(self):
        for turn, worker in self.some_turn():
            worker.free(turn.lease, self.chance.choice(["back", "lost"]))
            if self.chance.random() < 0.7:  # else a stalled worker that comes back later
                self.turns.remove((turn, worker))

    async def reap(self):
        for lease in self.table.redis.zrange(self.table.key("leases"), 0, -1):
            if self.chance.random() < 0.3:
                self.table.redis.zadd(self.table.key("leases"), {lease: 1})
        self.workers[0].reap()

    async def cancel(self):
        if self.jobs:
            job_id = self.chance.choice(self.jobs)
            before = (await self.table.jobs.get(job_id, "me")).status
            after = (await self.table.jobs.cancel(job_id, "me")).status
            assert after == (before if before in FINAL_STATUSES else "canceled")

    async def retry(self):
        if self.jobs:
            job_id = self.chance.choice(self.jobs)
            try:
                await self.table.jobs.retry(job_id, "me")
            except D3ServeError:
                return
            self.ended.pop(job_id, None)

    def some_turn(self):
        return [self.chance.choice(self.turns)] if self.turns else []

    async def finish(self):
        """Answer all that is left."""
        for turn, worker in self.turns:
            worker.free(turn.lease, "back")
        worker = self.table.worker("last")
        while (turn := worker.claim(1)).jobs:
            for job in turn.jobs:
                assert worker.succeed(turn.lease, job.id, self.response())
            worker.free(turn.lease, "back")


@pytest.mark.parametrize("seed", range(12))
async def test_every_job_ends_and_nothing_is_left(table, make_response, seed):
    history = History(table, seed, make_response)
    steps = (
        ["submit"] * 6 + ["claim"] * 4 + ["commit"] * 6 + ["more", "free", "free", "reap", "cancel", "retry"]
    )
    for _ in range(150):
        await getattr(history, history.chance.choice(steps))()
    await history.finish()
    for job_id in history.jobs:
        job = await table.jobs.get(job_id, "me")
        assert job.status in FINAL_STATUSES
        if job_id in history.ended:
            assert job.status == history.ended[job_id][0]
        if job.status == "succeeded":
            await table.jobs.result(job_id, "me")
    for name in ("pend", "own", "grp", "lease", "leasejobs", "leasegrps"):
        assert table.redis.keys(table.key(name, "*")) == []
    for lane in ("interactive", "offline"):
        assert (
            table.redis.zcard(table.key("queued", lane)) == table.redis.zcard(table.key("ready", lane)) == 0
        )
        assert set(table.redis.hvals(table.key("load", lane))) <= {"0"}
    assert table.redis.zcard(table.key("deadlines")) == 0
