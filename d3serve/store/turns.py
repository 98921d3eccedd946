"""The job table as a worker sees it (sync): claim a turn, take late joiners, renew, commit, free, reap."""

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import structlog

from d3serve.errors import RequestError, StateLost, error_class
from d3serve.schemas import DecisionResponse, JobError, Lane, Usage
from d3serve.settings import Settings
from d3serve.store.connect import RedisClient, open_sync
from d3serve.store.memory import SpareRoom
from d3serve.store.records import Stage
from d3serve.store.states import REFERENCE, StateFolder
from d3serve.store.table import Argument, Table
from d3serve.store.tally import observe

FAIRNESS_MS = 5_000  # a group that has waited longer goes before any warm one
OFFLINE_PATIENCE_MS = (
    30_000  # offline work that has waited longer has half of the work, however much is interactive
)
READ_BACK_SHARE = 8  # of what a tenant may keep: beyond it, what has its answer makes room for what waits
WARM_TTL_MS = 600_000
WORKER_TTL_MS = 30_000
MAX_GROUPS = 256
GLANCE_S = (
    0.25  # who looks between two steps of a pass would rather not know than let the device wait for longer
)

CALLED = b"called"  # no wake-up, which is JSON

# Given back unharmed; a lost attempt; given back, and too large to be claimed beside a long turn again.
FreeMode = Literal["back", "lost", "alone"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ClaimedJob:
    """One job of a turn; `state` is as `encode_state` wrote it, or None if lost, `questions` the JSON that was sent."""

    id: str
    group: str
    tenant: str
    model: str
    attempt: int
    state: str | None
    questions: str
    partial: bool
    asked_lane: str
    created_ms: int
    lane: str = "interactive"
    traceparent: str | None = None  # of its submission, where it is traced
    waited_ms: int = 0  # from its submission to this start, by Redis' clock
    claiming: tuple[float, float] = (0.0, 0.0)  # when its claim was sent and answered, by this host's clock


@dataclass(frozen=True)
class Success:
    """A job's answers, and the milliseconds of the passes that found them."""

    job_id: str
    response: DecisionResponse
    pass_ms: float | None


@dataclass
class Turn:
    """A lease with its jobs; empty when there was nothing to claim, or nobody knows the worker: `known` says which.

    `spent` is where the time of those that have ended went, to be counted when it is freed.
    """

    lease: str
    jobs: list[ClaimedJob]
    wakes: list[Lane] = field(default_factory=list)
    known: bool = True
    spent: Counter[str] = field(default_factory=Counter)

    def count(self, job: ClaimedJob, took_ms: int, spent_ms: Mapping[str, float | None]) -> None:
        """Note where a job's time went that took so long in all; 0: somebody else ended it."""
        if took_ms:
            observe(self.spent, job.lane, {"queue": job.waited_ms, **spent_ms, "total": took_ms})


@dataclass(frozen=True)
class Freed:
    """What freeing a lease did; `back` is -1 when it had ended before."""

    back: int
    ended: int
    wakes: list[Lane]


@dataclass(frozen=True)
class Reaped:
    """What a sweep did."""

    leases: int
    ended: int
    wakes: list[Lane]


class TurnStore:
    """Raises StorageUnavailable when its patience ends.

    `lease_s` and `max_batch_questions` are the same for every worker; tests choose others.

    A script that was sent and not answered is sent again, so each does no more the second time than the first; all
    but `count`, which may count twice. What is asked or told between the steps of a pass, and may as well be missed,
    has a client without patience.
    """

    lease_s = 60.0  # a claim not renewed for so long goes back to the queue
    max_batch_questions = 512  # of a turn and of each of its passes; the token budget ends most before

    def __init__(
        self, client: RedisClient, settings: Settings, worker: str, glancing: RedisClient | None = None
    ) -> None:
        self._table = Table(client, settings.namespace)
        self._glances = Table(glancing, settings.namespace) if glancing else self._table
        self._settings = settings
        self._key = self._table.key
        self._files = StateFolder(settings.state_dir) if settings.state_dir else None
        self._room = settings.max_kept_bytes_per_tenant // READ_BACK_SHARE
        self._spare = SpareRoom(self._table)
        self.worker = worker
        self._read_tokens = 0
        self.serves = (
            ""  # the model that this process has told of; where nobody knows of it any more it claims nothing
        )
        self.revision = ""  # of the weights that it has loaded

    @classmethod
    def open(cls, settings: Settings, worker: str, *, patience_s: float = 20) -> Self:
        """Make a store on `settings.redis_url`; it connects on first use."""
        glancing = open_sync(settings, patience_s=0, answer_s=GLANCE_S)
        return cls(open_sync(settings, patience_s=patience_s), settings, worker, glancing)

    def close(self) -> None:
        """Close the connections."""
        self._table.close()
        self._glances.close()

    @property
    def _lease_ms(self) -> int:
        return round(self.lease_s * 1000)

    # --- one turn ----------------------------------------------------------------------------------

    def claim(
        self, pid: int, *, beside: str = "", ahead: bool = False, max_tokens: int | None = None
    ) -> Turn:
        """Take whole state groups until the turn is full, one tenant's after another's; never one that a worker has.

        Groups whose jobs name a revision are only for a worker with `revision`. A turn that overtakes another of
        this worker waits, `beside` that one's lease, takes interactive work alone, and nothing that is larger than
        `max_tokens` or than a turn. Until the other tells its progress, it counts as given back if it is lost.

        So does a turn that is claimed `ahead`, while a pass of this worker's runs, until it tells its own. It is of
        such work too, and only of what nobody else could take now.
        """
        settings, lease = self._settings, secrets.token_hex(8)
        lanes = [lane for lane in settings.lanes if not beside or lane == "interactive"]
        most = settings.max_batch_tokens if max_tokens is None else min(max_tokens, settings.max_batch_tokens)
        began = time.time()
        known, *found = self._table.run(
            "claim", lease, self.worker, pid, self._lease_ms, most, self.max_batch_questions, MAX_GROUPS,
            FAIRNESS_MS, OFFLINE_PATIENCE_MS, self.serves, self.revision, beside, int(ahead), *lanes,
        )  # fmt: skip
        if not known:
            return Turn(lease, [], known=False)
        wakes, *groups = found
        return Turn(lease, self._jobs_of(groups, began), wakes)

    def more(self, lease: str) -> list[ClaimedJob]:
        """Take jobs that joined the turn's groups since it began."""
        settings, began = self._settings, time.time()
        groups = self._table.run("more", lease, settings.max_batch_tokens, self.max_batch_questions)
        return self._jobs_of(groups, began)

    def renew(self, lease: str) -> bool:
        """Keep the lease; False when it has ended and every commit will be refused."""
        return bool(self._table.run("renew", lease, self._lease_ms))

    def progress(self, lease: str, stage: Stage, jobs: Sequence[str]) -> set[str]:
        """Note a stage; tell which of the jobs still need work (not canceled, expired or taken away)."""
        return set(self._table.run("progress", lease, stage, "", "", *jobs)) if jobs else set()

    def succeed(
        self,
        lease: str,
        job_id: str,
        response: DecisionResponse,
        pass_ms: float | None = None,
        identity: str = "",
    ) -> int:
        """End a job with its answers, read in passes of so long by the weights of `identity`.

        The milliseconds since its submission, at least 1; 0 when it is no longer this lease's to end.
        """
        return self.succeed_all(lease, [Success(job_id, response, pass_ms)], identity)[0]

    def succeed_all(self, lease: str, successes: Sequence[Success], identity: str) -> list[int]:
        """End jobs with their answers, each in a step of its own, all in one round trip; as `succeed`."""
        if not successes:
            return []
        self._read_tokens += sum(each.response.usage.computed_tokens for each in successes)
        room = self._room if self._spare.is_there() else 0
        calls = [
            (
                lease, each.job_id, "succeeded", each.response.model_dump_json(),
                each.response.usage.model_dump_json(), len(each.response.answers),
                "" if each.pass_ms is None else round(each.pass_ms, 1), identity, "", room,
            )
            for each in successes
        ]  # fmt: skip
        return [int(took_ms) for took_ms in self._table.run_each("commit", calls)]

    def take_read_tokens(self) -> int:
        """The tokens that were read for answers since this was last asked: all but those that were cached."""
        tokens, self._read_tokens = self._read_tokens, 0
        return tokens

    def fail(self, lease: str, job_id: str, error: JobError, usage: Usage | None = None) -> int:
        """End a job with an error; the milliseconds since its submission, 0 when it is no longer this lease's to end.

        A refusal of the request ends it also after the lease was lost: every attempt would find the same.
        """
        told = usage.model_dump_json() if usage else ""
        text = error.model_dump_json(exclude_none=True)
        refusal = issubclass(error_class(error.code), RequestError) and not error.retryable
        return int(self._table.run("commit", lease, job_id, "failed", text, told, 0, "", "", int(refusal)))

    def free(
        self, lease: str, mode: FreeMode, warm: Sequence[str] = (), spent: Mapping[str, int] | None = None
    ) -> Freed:
        """End the lease, and count where the time of its jobs went; what is unfinished waits again."""
        told: list[Argument] = [len(warm), *warm, *_pairs(spent or {})]
        return Freed(*self._table.run("free", lease, mode, self.worker, WARM_TTL_MS, *told))

    # --- between the steps of a pass ----------------------------------------------------------------

    def interactive_waits(self) -> bool:
        """Whether a claim beside a long turn may find something; one cheap command."""
        return bool(self._glances.send("zcard", self._key("ready", "interactive")))

    def held(self, lease: str) -> set[str]:
        """The jobs of a lease that are neither done nor taken away; one cheap command."""
        return set(self._glances.send("smembers", self._key("leasejobs", lease)))

    def note_share(self, lease: str, jobs: Sequence[str], share: float, eta_s: float) -> None:
        """Note the share of the jobs' work that is done, and about how many seconds are left."""
        self._glances.run("progress", lease, "deciding", f"{share:.4f}", f"{eta_s:.1f}", *jobs)

    # --- between turns -----------------------------------------------------------------------------

    def wait_for_call(self, seconds: float) -> bytes | None:
        """Wait for work without Celery: who brings some calls this worker, and need send no wake-up.

        What stands in the queues of its lanes is taken too, as it is. CALLED if it was called; None if nothing came.
        """
        lanes = self._settings.lanes
        self._table.run("idle", self.worker, round(seconds * 1000), *lanes)
        queues = [self._key("call", self.worker), *(self._key("mq", lane) for lane in lanes)]
        taken = self._table.send("execute_command", "BRPOP", *queues, seconds, NEVER_DECODE=True)
        if not taken:
            return None
        return CALLED if taken[0] == queues[0].encode() else bytes(taken[1])

    def wait_no_longer(self) -> list[Lane]:
        """Be called no more; the lanes for which this worker was meanwhile, so that others must be woken."""
        return list(self._table.run("idle", self.worker, 0, *self._settings.lanes))

    def reap(self) -> Reaped:
        """Free leases that ran out, end overdue jobs, find lanes whose wake-up was lost."""
        return Reaped(*self._table.run("reap", *self._settings.lanes))

    def own_leases(self) -> dict[str, int]:
        """This worker's leases, each with the process id that holds it."""
        leases = self._table.send("zrange", self._key("leases"), 0, -1)
        rows = [self._table.send("hmget", self._key("lease", lease), "worker", "pid") for lease in leases]
        return {
            lease: int(pid)
            for lease, (worker, pid) in zip(leases, rows, strict=True)
            if worker == self.worker and pid
        }

    def publish(self, fields: Mapping[str, str | int | float]) -> None:
        """Say how this worker is, and that it is alive, for the next 30 s."""
        self._table.run("tell", self.worker, WORKER_TTL_MS, *_pairs(fields))

    def serve(self, model: str, fields: Mapping[str, str | int | float]) -> tuple[str, str] | None:
        """Publish fields beside the name of a model; None, or the live worker and its other model that forbid it."""
        found = self._table.run("serve", self.worker, WORKER_TTL_MS, model, *_pairs(fields))
        return (found[0], found[1]) if found else None

    def published(self, *fields: str) -> list[str | None]:
        """What this worker has published, field by field."""
        return list(self._table.send("hmget", self._key("worker", self.worker), *fields))

    def count(self, name: str) -> int:
        """Add one to a counter among what this worker publishes; the new value."""
        return int(self._table.run("count", self.worker, WORKER_TTL_MS, name))

    def retire(self) -> None:
        """Take this worker off the list of the living."""
        self._table.send("delete", self._key("worker", self.worker))
        self._table.send("zrem", self._key("workers"), self.worker)

    # --- the small parts ---------------------------------------------------------------------------

    def _state(self, kept: str | None) -> str | None:
        """What `st:<group>` holds or refers to; None, and a word in the log, where it is gone."""
        if kept is None or not kept.startswith(REFERENCE):
            return kept
        if self._files is None:
            log.error("state.folder_unset", need="D3SERVE_STATE_DIR as the API has it")
            return None
        try:
            return self._files.read(kept)
        except StateLost as error:
            log.error("state.lost", file=kept, reason=error.message)
            return None

    def _jobs_of(
        self, groups: Sequence[tuple[str, str | None, list[list[str]]]], began: float
    ) -> list[ClaimedJob]:
        """The jobs that a script has handed out, with the state of each group."""
        claiming = began, time.time()
        return [
            ClaimedJob(
                id=job_id, group=group, tenant=tenant, model=model, attempt=int(attempt), state=state,
                questions=questions, partial=on_error == "partial", asked_lane=asked_lane or "",
                created_ms=int(created), lane=lane, traceparent=traceparent or None,
                waited_ms=int(started) - int(created), claiming=claiming,
            )
            for group, kept, jobs in groups
            for state in [self._state(kept)]
            for (
                job_id, questions, tenant, model, attempt, on_error, asked_lane, created, lane, traceparent, started,
            ) in jobs
        ]  # fmt: skip


def _pairs(fields: Mapping[str, Argument]) -> list[Argument]:
    return [part for pair in fields.items() for part in pair]
