"""Pages through a tenant's jobs, newest first, stable while new jobs arrive."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from d3serve.errors import InvalidRequest
from d3serve.schemas import JobStatus
from d3serve.store.records import JobRecord, RecordPage
from d3serve.store.table import AsyncTable

AT_ONCE = 100
SCAN = 1_000  # jobs looked at for one page, however few of them match


@dataclass(frozen=True)
class Filters:
    """What a listed job must match; None matches all."""

    status: JobStatus | None = None
    model: str | None = None
    created_after: float | None = None
    metadata: Mapping[str, str] | None = None

    def match(self, status: str | None, model: str | None, metadata: str | None) -> bool:
        """Whether a job with these fields is wanted; one that is gone has none (its age has been looked at before)."""
        return (
            status is not None
            and self.status in (None, status)
            and self.model in (None, model)
            and (not self.metadata or self.metadata.items() <= json.loads(metadata or "{}").items())
        )


@dataclass(frozen=True)
class JobPlace:
    """A place between two jobs: after the job `job_id`, created at `created_us`, in microseconds."""

    created_us: int
    job_id: str

    @classmethod
    def parse(cls, cursor: str) -> "JobPlace":
        """Read a cursor.

        Raises:
            InvalidRequest: it is not one of ours.
        """
        created, _, job_id = cursor.partition(".")
        if not (created.isdecimal() and created.isascii() and len(created) <= 16 and job_id):
            raise InvalidRequest("this cursor is not one that we gave out", field="cursor")
        return cls(int(created), job_id)

    @property
    def score(self) -> str:
        """As Redis has it, exactly: milliseconds with three decimals."""
        return f"{self.created_us // 1000}.{self.created_us % 1000:03d}"

    def __str__(self) -> str:
        return f"{self.created_us}.{self.job_id}"


async def page(
    table: AsyncTable, tenant: str, filters: Filters, limit: int, cursor: str | None
) -> RecordPage:
    """One page; it may hold fewer than `limit` jobs and still have a cursor, where the filters match little."""
    place = JobPlace.parse(cursor) if cursor else None
    found: list[JobRecord] = []
    for _ in range(SCAN // AT_ONCE):
        places = await _next(table, tenant, filters.created_after, place)
        wanted = (await _matching(table, filters, places))[: limit - len(found)]
        found += await _read(table, wanted)
        if wanted and len(found) == limit:
            return RecordPage(tuple(found), str(wanted[-1]))
        if len(places) < AT_ONCE:
            return RecordPage(tuple(found), None)
        place = places[-1]
    return RecordPage(tuple(found), str(place))


async def _next(
    table: AsyncTable, tenant: str, created_after: float | None, place: JobPlace | None
) -> list[JobPlace]:
    """The next jobs after a place; jobs of one microsecond stand in reverse order of their ids."""
    # Jobs show their age in whole milliseconds.
    oldest = "-inf" if created_after is None else f"({round(created_after * 1000)}.999"
    newest = "+inf" if place is None else place.score
    skip = 0
    if place is not None:
        same = await table.send("zrevrangebyscore", table.key("jobs", tenant), newest, newest)
        skip = sum(1 for job_id in same if job_id >= place.job_id)
    pairs = await table.send(
        "zrevrangebyscore",
        table.key("jobs", tenant),
        newest,
        oldest,
        start=skip,
        num=AT_ONCE,
        withscores=True,
    )
    return [JobPlace(round(score * 1000), job_id) for job_id, score in pairs]


async def _matching(table: AsyncTable, filters: Filters, places: list[JobPlace]) -> list[JobPlace]:
    """Those of the jobs that match; only what the filters ask for is read."""
    async with table.pipeline() as pipe:
        for place in places:
            pipe.hmget(table.key("job", place.job_id), "status", "model", "metadata")
        told = await pipe.execute()
    return [place for place, row in zip(places, told, strict=True) if filters.match(*row)]


async def _read(table: AsyncTable, places: list[JobPlace]) -> list[JobRecord]:
    """The jobs; one that has gone meanwhile is left out."""
    async with table.pipeline() as pipe:
        for place in places:
            pipe.hgetall(table.key("job", place.job_id))
        rows = await pipe.execute()
    return [JobRecord.from_hash(place.job_id, row) for place, row in zip(places, rows, strict=True) if row]
