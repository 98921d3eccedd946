"""Pages through a tenant's jobs, newest first, stable while new jobs arrive."""

from collections.abc import Mapping
from dataclasses import dataclass

from d3serve.errors import InvalidRequest
from d3serve.schemas import JobStatus
from d3serve.store.connect import AsyncClient
from d3serve.store.keys import Keys
from d3serve.store.records import JobPage, JobRecord

BATCH = 100
SCAN = 1_000  # jobs looked at for one page, however few of them match


@dataclass(frozen=True)
class Filters:
    """What a listed job must match; None matches all."""

    status: JobStatus | None = None
    model: str | None = None
    created_after: float | None = None
    metadata: Mapping[str, str] | None = None

    def match(self, job: JobRecord) -> bool:
        """Whether the job is wanted (its age has been looked at before)."""
        return (
            (self.status is None or job.status == self.status)
            and (self.model is None or job.request["model"] == self.model)
            and all(job.metadata.get(name) == value for name, value in (self.metadata or {}).items())
        )


@dataclass(frozen=True)
class Place:
    """A place between two jobs: after the job `job_id`, created at `created_ms`."""

    created_ms: int
    job_id: str

    @classmethod
    def parse(cls, cursor: str) -> "Place":
        """Read a cursor.

        Raises:
            InvalidRequest: it is not one of ours.
        """
        created, _, job_id = cursor.partition(".")
        if not (created.isdecimal() and created.isascii() and len(created) < 16 and job_id):
            raise InvalidRequest("this cursor is not one that we gave out", field="cursor")
        return cls(int(created), job_id)

    def __str__(self) -> str:
        return f"{self.created_ms}.{self.job_id}"


async def page(
    client: AsyncClient, keys: Keys, tenant: str, filters: Filters, limit: int, cursor: str | None
) -> JobPage:
    """One page; it may hold fewer than `limit` jobs and still have a cursor, where the filters match little."""
    place = Place.parse(cursor) if cursor else None
    found: list[JobRecord] = []
    for _ in range(SCAN // BATCH):
        rows = await _batch(client, keys, tenant, filters.created_after, place)
        for created_ms, job_id, row in rows:
            place = Place(created_ms, job_id)
            if row and filters.match(job := JobRecord.from_hash(job_id, row)):
                found.append(job)
                if len(found) == limit:
                    return JobPage(tuple(found), str(place))
        if len(rows) < BATCH:
            return JobPage(tuple(found), None)
    return JobPage(tuple(found), str(place))


async def _batch(
    client: AsyncClient, keys: Keys, tenant: str, created_after: float | None, place: Place | None
) -> list[tuple[int, str, dict[str, str]]]:
    """The next jobs after a place; jobs of one millisecond stand in reverse order of their ids."""
    oldest = "-inf" if created_after is None else f"({round(created_after * 1000)}"
    newest = "+inf" if place is None else str(place.created_ms)
    skip = 0
    if place is not None:
        same = await client.zrevrangebyscore(keys("jobs", tenant), newest, newest)
        skip = sum(1 for job_id in same if job_id >= place.job_id)
    pairs = await client.zrevrangebyscore(
        keys("jobs", tenant), newest, oldest, start=skip, num=BATCH, withscores=True
    )
    async with client.pipeline(transaction=False) as pipe:
        for job_id, _ in pairs:
            pipe.hgetall(keys("job", job_id))
        rows = await pipe.execute()
    return [(int(score), job_id, row) for (job_id, score), row in zip(pairs, rows, strict=True)]
