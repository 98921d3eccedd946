"""Who works, on what, and how much waits: read-only views of the job table for the API."""

import time

from d3serve.schemas import Lane, ModelInfo
from d3serve.store.connect import AsyncClient
from d3serve.store.keys import Keys
from d3serve.store.records import LaneStats, QueuePosition, QueueStats, WorkerInfo

LANES: tuple[Lane, ...] = ("interactive", "offline")
SPEED_AGE_S = 1.0


class Census:
    """Views that are right to within about a second; none of them changes anything."""

    def __init__(self, client: AsyncClient, keys: Keys) -> None:
        self._client = client
        self._key = keys
        self._speed = 0.0
        self._speed_until = 0.0

    async def now_ms(self) -> int:
        """Redis' clock."""
        seconds, micros = await self._client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def workers(self) -> list[WorkerInfo]:
        """Every worker that has given a sign of life lately."""
        ids = await self._client.zrangebyscore(self._key("workers"), await self.now_ms(), "+inf")
        async with self._client.pipeline(transaction=False) as pipe:
            for worker in ids:
                pipe.hgetall(self._key("worker", worker))
            rows = await pipe.execute()
        return [WorkerInfo.from_hash(worker, row) for worker, row in zip(ids, rows, strict=True) if row]

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

    async def position(self, job_id: str, lane: Lane) -> QueuePosition | None:
        """Where a job waits in its lane, or None when it no longer waits."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.zrank(self._key("queued", lane), job_id)
            pipe.zcard(self._key("queued", lane))
            pipe.hget(self._key("load", lane), "tokens")
            rank, waiting, tokens = await pipe.execute()
        if rank is None:
            return None
        ahead = int(int(tokens or 0) * rank / max(waiting, 1))
        speed = await self.tokens_per_s()
        return QueuePosition(rank, ahead, round(ahead / speed, 1) if speed else None)

    async def stats(self) -> QueueStats:
        """The queue as it is now."""
        workers, now = await self.workers(), await self.now_ms()
        lanes = {lane: await self._lane(lane, now) for lane in LANES}
        leases = await self._client.zrange(self._key("leases"), 0, -1)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hgetall(self._key("finished"))
            pipe.hgetall(self._key("work"))
            for lease in leases:
                pipe.scard(self._key("leasejobs", lease))
            finished, work, *running = await pipe.execute()
        return QueueStats(
            lanes=lanes,
            running_jobs=sum(running),
            workers=len(workers),
            tokens_per_s=sum(worker.tokens_per_s for worker in workers),
            finished={status: int(count) for status, count in finished.items()},
            work={name: int(count) for name, count in work.items()},
        )

    async def _lane(self, lane: Lane, now_ms: int) -> LaneStats:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.zcard(self._key("queued", lane))
            pipe.zcard(self._key("ready", lane))
            pipe.hmget(self._key("load", lane), "tokens", "bytes")
            pipe.zrange(self._key("queued", lane), 0, 0, withscores=True)
            jobs, ready, (tokens, size), oldest = await pipe.execute()
        age = max(0.0, (now_ms - oldest[0][1]) / 1000) if oldest else 0.0
        return LaneStats(jobs, ready, int(tokens or 0), int(size or 0), age)
