"""Who works, on what, and how much waits: read-only views of the job table for the API."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from d3serve.schemas import Lane, ModelInfo
from d3serve.store.records import LaneStats, QueuePosition, QueueStats, WorkerInfo
from d3serve.store.table import AsyncTable
from d3serve.store.tally import Counted

LANES: tuple[Lane, ...] = ("interactive", "offline")
SPEED_AGE_S = 1.0


@dataclass(frozen=True)
class Crowd:
    """The tokens that each tenant has waiting in a lane, those of a job on average, and how long both are believed."""

    tokens: Mapping[str, int]
    tokens_per_job: float
    until: float


class Census:
    """Views that are right to within about a second; none of them changes anything."""

    def __init__(self, table: AsyncTable) -> None:
        self._table = table
        self._key = table.key
        self._speed = 0.0
        self._speed_until = 0.0
        self._crowds: dict[Lane, Crowd] = {}

    async def workers(self) -> list[WorkerInfo]:
        """Every worker that has given a sign of life lately."""
        now_ms = await self._table.now_us() // 1000
        ids = await self._table.send("zrangebyscore", self._key("workers"), now_ms, "+inf")
        async with self._table.pipeline() as pipe:
            for worker in ids:
                pipe.hgetall(self._key("worker", worker))
            rows = await pipe.execute()
        return [WorkerInfo.from_hash(worker, row) for worker, row in zip(ids, rows, strict=True) if row]

    async def running(self) -> Counter[str]:
        """How many jobs each worker has under its leases, by its id."""
        leases = await self._table.send("zrange", self._key("leases"), 0, -1)
        async with self._table.pipeline() as pipe:
            for lease in leases:
                pipe.hget(self._key("lease", lease), "worker")
                pipe.scard(self._key("leasejobs", lease))
            told = await pipe.execute()
        running = Counter[str]()
        for worker, jobs in zip(told[::2], told[1::2], strict=True):
            if worker is not None:  # else its turn has ended meanwhile
                running[worker] += jobs
        return running

    async def models(self) -> list[ModelInfo]:
        """What live workers serve, each once; also while one loads its model again after a crash."""
        served = [worker.model for worker in await self.workers() if worker.model and worker.load != "failed"]
        return list({model.model_dump_json(): model for model in served}.values())

    async def tokens_per_s(self) -> float:
        """The speed of all workers together, at most a second old; 0.0 when nobody has told."""
        if time.monotonic() >= self._speed_until:
            self._speed = sum(worker.tokens_per_s for worker in await self.workers())
            self._speed_until = time.monotonic() + SPEED_AGE_S
        return self._speed

    async def position(self, job_id: str) -> QueuePosition | None:
        """Where a job waits in its lane, or None when it no longer waits.

        Tenants take turns: while those of its own come first, every other tenant is given as much, or all it asked for.
        """
        found = await self._table.run("ahead", job_id)
        if not found:
            return None
        lane, tenant, jobs, tokens = found
        crowd = await self._crowd_of(lane)
        others = sum(min(waiting, tokens) for other, waiting in crowd.tokens.items() if other != tenant)
        ahead = tokens + others
        speed = await self.tokens_per_s()
        return QueuePosition(
            jobs + round(others / crowd.tokens_per_job), ahead, round(ahead / speed, 1) if speed else None
        )

    async def ahead_of(self, lane: Lane, tenant: str, tokens: int) -> int:
        """The tokens that would be decided before a job of so many that came now, tenants taking turns."""
        crowd = await self._crowd_of(lane)
        own = crowd.tokens.get(tenant, 0)
        return own + sum(
            min(waiting, own + tokens) for other, waiting in crowd.tokens.items() if other != tenant
        )

    async def _crowd_of(self, lane: Lane) -> "Crowd":
        """What each tenant has waiting in a lane, at most a second old: every poll of a waiting job asks."""
        crowd = self._crowds.get(lane)
        if crowd is None or time.monotonic() >= crowd.until:
            async with self._table.pipeline() as pipe:
                pipe.hgetall(self._key("waiting", lane))
                pipe.zcard(self._key("queued", lane))
                told, jobs = await pipe.execute()
            tokens = {tenant: int(count) for tenant, count in told.items()}
            average = max(1.0, sum(tokens.values()) / max(jobs, 1))
            crowd = self._crowds[lane] = Crowd(tokens, average, time.monotonic() + SPEED_AGE_S)
        return crowd

    async def waiting_tokens(self, tenant: str | None) -> int:
        """The tokens that wait in all lanes: of one tenant, or of all."""
        crowds = [await self._crowd_of(lane) for lane in LANES]
        return sum(
            count for crowd in crowds for name, count in crowd.tokens.items() if tenant in (None, name)
        )

    async def waiting_of(self, tenant: str) -> dict[Lane, dict[str, int]]:
        """A tenant's own jobs that wait, and their tokens, by lane."""
        async with self._table.pipeline() as pipe:
            for lane in LANES:
                pipe.zcard(self._key("line", f"{lane}:{tenant}"))
                pipe.hget(self._key("waiting", lane), tenant)
            told = [int(count or 0) for count in await pipe.execute()]
        pairs = zip(told[::2], told[1::2], strict=True)
        return {
            lane: {"queued_jobs": jobs, "queued_tokens": tokens}
            for lane, (jobs, tokens) in zip(LANES, pairs, strict=True)
        }

    async def stats(self) -> QueueStats:
        """The queue as it is now."""
        workers, now_ms = await self.workers(), await self._table.now_us() // 1000
        lanes = {lane: await self._lane(lane, now_ms) for lane in LANES}
        running = await self.running()
        async with self._table.pipeline() as pipe:
            pipe.hgetall(self._key("finished"))
            pipe.hgetall(self._key("work"))
            finished, work = await pipe.execute()
        return QueueStats(
            lanes=lanes,
            running_jobs=running.total(),
            workers=len(workers),
            tokens_per_s=sum(worker.tokens_per_s for worker in workers),
            finished={status: int(count) for status, count in finished.items()},
            work={name: int(count) for name, count in work.items()},
        )

    async def tally(self) -> Counted:
        """What all processes have counted together, and the webhook events that wait."""
        async with self._table.pipeline() as pipe:
            pipe.hgetall(self._key("tally"))
            pipe.zrange(self._key("outboxes"), 0, -1, withscores=True)
            counted, outboxes = await pipe.execute()
        async with self._table.pipeline() as pipe:
            for tenant, _ in outboxes:
                pipe.zcard(self._key("outbox", tenant))
            pending = sum(await pipe.execute())
        late_s = await self._table.now_us() / 1e6 - outboxes[0][1] / 1000 if outboxes else 0.0
        return Counted.of(counted, pending, max(0.0, late_s))

    async def _lane(self, lane: Lane, now_ms: int) -> LaneStats:
        async with self._table.pipeline() as pipe:
            pipe.zcard(self._key("queued", lane))
            pipe.zcard(self._key("ready", lane))
            pipe.hmget(self._key("load", lane), "tokens", "bytes")
            pipe.zrange(self._key("queued", lane), 0, 0, withscores=True)
            jobs, ready, (tokens, size), oldest = await pipe.execute()
        age = max(0.0, (now_ms - oldest[0][1]) / 1000) if oldest else 0.0
        return LaneStats(jobs, ready, int(tokens or 0), int(size or 0), age)
