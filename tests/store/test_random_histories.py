"""Any history of calls, in any order: no job is lost or ended twice, no counter drifts, no turn is another's."""

import random

import pytest

from d3serve.errors import D3ServeError
from d3serve.schemas import FINAL_STATUSES, JobError
from d3serve.store.census import LANES

pytestmark = pytest.mark.anyio
MAX_TOKENS, MAX_QUESTIONS = 400, 6
TENANTS = ("me", "you", "they")
STEPS = {"fakeredis": 50, "valkey": 150, "redis": 150}  # the imitation takes ten times as long for each


class History:
    """Random callers on one table; what they were told must agree with what the table says."""

    def __init__(self, table, seed, make_response):
        self.table, self.chance = table, random.Random(seed)  # noqa: S311 # chance, not secrecy
        self.response = make_response
        self.workers = [
            table.worker(f"w{i}", max_batch_tokens=MAX_TOKENS, max_batch_questions=MAX_QUESTIONS)
            for i in range(3)
        ]
        self.turns, self.jobs, self.ended, self.owner = [], [], {}, {}

    async def submit(self):
        state = f"state {self.chance.randrange(5)} " + "x" * self.chance.choice([0, 400, 3_000])
        options = {
            "lane": self.chance.choice([None, "offline"]),
            "priority": self.chance.choice(["low", "high"]),
        }
        tenant, questions = self.chance.choice(TENANTS), ("a", "b")[: self.chance.randint(1, 2)]
        job_id = await self.table.submit(state, questions, tenant=tenant, **options)
        self.jobs.append(job_id)
        self.owner[job_id] = tenant

    async def claim(self):
        worker = self.chance.choice(self.workers)
        next_tenants = {lane: self.next_tenants(lane) for lane in LANES}
        turn = worker.claim(1)
        if not turn.jobs:
            return
        lane = self.table.redis.hget(self.table.key("lease", turn.lease), "lane")
        assert turn.jobs[0].tenant in next_tenants[lane], "it was another tenant's turn"
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
            good, code = (
                self.chance.random() < 0.7,
                self.chance.choice(["internal_error", "invalid_question"]),
            )
            accepted = (
                worker.succeed(turn.lease, job.id, self.response())
                if good
                else worker.fail(turn.lease, job.id, JobError(code=code, message="m"))
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
            before = (await self.table.jobs.get(job_id, self.owner[job_id])).status
            after = (await self.table.jobs.cancel(job_id, self.owner[job_id])).status
            assert after == (before if before in FINAL_STATUSES else "canceled")

    async def retry(self):
        if self.jobs:
            job_id = self.chance.choice(self.jobs)
            try:
                await self.table.jobs.retry(job_id, self.owner[job_id])
            except D3ServeError:
                return
            self.ended.pop(job_id, None)

    async def delete(self):
        if self.jobs:
            job_id = self.chance.choice(self.jobs)
            try:
                await self.table.jobs.delete(job_id, self.owner[job_id])
            except D3ServeError:
                return
            self.jobs.remove(job_id)

    def next_tenants(self, lane):
        """Those of the tenants that wait in a lane which have been given the fewest tokens."""
        redis, key = self.table.redis, self.table.key
        pace = float(redis.hget(key("pace"), lane) or 0)
        tags = {
            tenant: max(tag, pace)
            for tenant, tag in redis.zrange(key("ring", lane), 0, -1, withscores=True)
            if redis.zcard(key("share", f"{lane}:{tenant}"))
        }
        assert set(tags) == {t for t in TENANTS if redis.zcard(key("share", f"{lane}:{t}"))}
        return {tenant for tenant, tag in tags.items() if tag == min(tags.values())}

    def recount(self):
        """Every counter of a tenant is the sum of what it counts."""
        redis, key = self.table.redis, self.table.key
        kept = dict.fromkeys(TENANTS, 0)
        for held in redis.zrange(key("holds"), 0, -1):
            what, size, tenant = held.split(" ")
            assert redis.exists(key("job", what), key("st", what)), "counted, but gone"
            kept[tenant] += int(size)
        assert redis.hgetall(key("kept")) == {tenant: str(size) for tenant, size in kept.items() if size}
        stored = sum(redis.strlen(name) for part in ("st", "body") for name in redis.keys(key(part, "*")))
        records = sum(int(redis.hget(name, "record")) for name in redis.keys(key("job", "*")))
        assert sum(kept.values()) == stored + records
        for lane in LANES:
            lines = {t: redis.zrange(key("line", f"{lane}:{t}"), 0, -1) for t in TENANTS}
            assert sorted(job for line in lines.values() for job in line) == sorted(
                redis.zrange(key("queued", lane), 0, -1)
            )
            waiting = {
                t: sum(int(n) for job in line for n in redis.hmget(key("job", job), "tokens", "state_tokens"))
                for t, line in lines.items()
            }
            assert redis.hgetall(key("waiting", lane)) == {t: str(n) for t, n in waiting.items() if n}
            shares = [group for t in TENANTS for group in redis.zrange(key("share", f"{lane}:{t}"), 0, -1)]
            assert sorted(shares) == sorted(redis.zrange(key("ready", lane), 0, -1))

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


@pytest.mark.parametrize("seed", range(6))
async def test_every_job_ends_and_nothing_is_left(table, make_response, seed, request):
    server = request.node.callspec.params["table"]
    history = History(table, f"{server} {seed}", make_response)
    steps = (
        ["submit"] * 6
        + ["claim"] * 4
        + ["commit"] * 6
        + ["more", "free", "free", "reap", "cancel", "retry", "delete"]
    )
    for step in range(STEPS[server]):
        await getattr(history, history.chance.choice(steps))()
        if step % 5 == 0:
            history.recount()
    await history.finish()
    for job_id in history.jobs:
        job = await table.jobs.get(job_id, history.owner[job_id])
        assert job.status in FINAL_STATUSES
        if job_id in history.ended:
            assert job.status == history.ended[job_id][0]
        if job.status == "succeeded":
            await table.jobs.result(job_id, history.owner[job_id])
    for name in ("pend", "own", "grp", "lease", "leasejobs", "leasegrps"):
        assert table.redis.keys(table.key(name, "*")) == []
    history.recount()
    for lane in LANES:
        assert (
            table.redis.zcard(table.key("queued", lane)) == table.redis.zcard(table.key("ready", lane)) == 0
        )
        assert set(table.redis.hvals(table.key("load", lane))) <= {"0"}
    assert table.redis.zcard(table.key("deadlines")) == 0
