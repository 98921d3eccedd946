"""Every Redis key of the job table, spelled once: Python and Lua both read this table.

A key is `d3:{<namespace>}:` + its stem + at most one part. The braces put a whole queue into one hash
slot, so that one script may touch all of it. Times inside values are milliseconds of Redis' own clock.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

KeyName = Literal[
    "job", "body", "res", "gone", "idem", "jobs", "kept", "holds", "erased", "callers", "rate",
    "st", "need", "grp", "pend", "own", "warm",
    "queued", "line", "load", "waiting", "ready", "share", "ring", "pace", "wake", "mq", "idle", "call",
    "lease", "leasejobs", "leasegrps", "leases", "deadlines",
    "worker", "workers", "finished", "work", "tally", "hooks_due", "outbox", "outboxes",
    "delivery", "told", "events", "hooks_open", "hooks_of", "hook_secret", "endpoints", "folder", "done",
    "count", "counts", "counted",
    "file", "files", "piece", "batch", "batches", "flight", "labels", "feed", "feeds",
]  # fmt: skip


class Key(NamedTuple):
    """One row: `stem` is followed by the part that `type` is keyed by, if it ends in a separator."""

    stem: str
    type: str
    content: str
    ttl: str
    writer: str
    reader: str


TABLE: dict[KeyName, Key] = {
    # the job
    "job": Key("job:", "hash", "everything about job <id> but its texts", "result TTL, from its end",
               "submit claim progress commit free cancel retry", "API, worker"),
    "body": Key("body:", "string", "questions of job <id>, JSON as sent",
                "1 h from success if there is room, else as job", "submit", "worker, API (read back)"),
    "res": Key("res:", "string", "DecisionResponse of job <id>, JSON", "as job", "commit", "API"),
    "gone": Key("gone:", "string", "tombstone of job <id>: '<expires> <tenant>'", "result TTL + tombstone TTL",
                "commit free cancel delete", "API (410, not 404)"),
    "idem": Key("idem:", "string", "'<job id> <fingerprint>' of an Idempotency-Key (hashed with its tenant)",
                "idempotency TTL", "submit", "submit"),
    "jobs": Key("jobs:", "zset", "job ids of a <tenant> by creation, to the microsecond", "an id goes with its job",
                "submit reap delete", "API (list)"),
    "kept": Key("kept", "hash", "bytes kept for each tenant: the sum of its `holds`", "-", "hold let_go", "submit"),
    "holds": Key("holds", "zset", "'<job id or group> <bytes> <tenant>' by until when it is kept", "-",
                 "hold let_go", "reap"),
    "erased": Key("erased", "string", "since when erased texts stand in the append-only file", "until it is rewritten",
                  "delete", "sweep"),
    "callers": Key("callers:", "string", "how many synchronous calls wait for job <id>", "2 min", "API (join)",
                   "API (callers)"),
    "rate": Key("rate:", "string", "requests of API key <id> in this minute", "1 min", "API", "API"),
    # the state group: jobs that share one state
    "st": Key("st:", "string", "state of <group>, once: '=text', JSON, '&…' with its media or '@<file> <bytes>'",
              "while `need` has a member", "submit", "worker, API (sweep, read back)"),
    "need": Key("need:", "zset", "job ids that need the state of <group>, by until when", "as st",
                "submit commit free cancel delete", "the same scripts"),
    "grp": Key("grp:", "hash", "<group>: lane, tenant, revision, state_tokens", "deleted when empty", "submit",
               "claim free"),
    "pend": Key("pend:", "zset", "waiting job ids of <group> by rank", "-", "submit claim free", "claim more"),
    "own": Key("own:", "string", "lease that works on <group>", "deleted by free", "claim", "submit free"),
    "warm": Key("warm:", "string", "worker whose cache holds the state of <group>", "10 min", "free", "claim"),
    # the lane
    "queued": Key("queued:", "zset", "waiting job ids of <lane> by rank", "-", "submit claim free", "API"),
    "load": Key("load:", "hash", "bytes, and tokens with each job's state, that wait in <lane>", "-",
                "submit claim free", "API"),
    "ready": Key("ready:", "zset", "groups of <lane> that wait and nobody owns, by rank of their first job",
                 "-", "submit free", "claim"),
    # the tenants of a lane: docs/adr/0008; a shelf is '<lane>', or '<lane>@<revision>' for jobs that name one
    "line": Key("line:", "zset", "waiting job ids of <lane>:<tenant> by rank", "-", "submit claim free", "submit, API"),
    "waiting": Key("waiting:", "hash", "tokens, with each job's state, that wait in <lane>, by tenant", "-",
                   "submit claim free", "API"),
    "share": Key("share:", "zset", "groups of <shelf>:<tenant> that wait and nobody owns, by rank of their first job",
                 "-", "submit free", "claim"),
    "ring": Key("ring:", "zset", "tenants on <shelf> by the tokens that they have been given",
                "a tenant leaves when it has nothing there and all others have been given as much", "submit claim more",
                "claim more"),
    "pace": Key("pace", "hash", "<lane>: tokens at which a tenant joins; what the lanes were given side by side", "-",
                "claim", "submit claim"),
    "wake": Key("wake:", "string", "a wake-up of <lane> is out", "2 s", "submit free reap", "the same scripts"),
    "mq": Key("mq:wake.", "list", "wake-ups of <lane>", "-", "Celery", "Celery, worker, reap (is one waiting?)"),
    "idle": Key("idle:", "zset", "workers that wait for work of <lane> by themselves, by until when", "2 s, renewed",
                "worker", "whoever would send a wake-up"),
    "call": Key("call:", "list", "lanes that worker <id> is called for while it waits", "2 s",
                "whoever would send a wake-up", "worker"),
    # the lease
    "lease": Key("lease:", "hash", "<lease>: worker, pid, lane, ms", "deleted by free", "claim", "free"),
    "leasejobs": Key("leasejobs:", "set", "job ids under <lease>", "deleted by free", "claim more", "free"),
    "leasegrps": Key("leasegrps:", "set", "groups under <lease>", "deleted by free", "claim", "more free"),
    "leases": Key("leases", "zset", "leases by when they run out", "-", "claim renew", "reap"),
    "deadlines": Key("deadlines", "zset", "job ids by when they expire", "-", "submit claim free", "reap"),
    # the rest
    "worker": Key("worker:", "hash", "what worker <id> says of itself", "30 s, renewed", "worker", "API"),
    "workers": Key("workers", "zset", "worker ids by until when they count as alive", "-", "worker",
                   "claim, API"),
    "finished": Key("finished", "hash", "how many jobs ever ended, by status", "-", "finish", "API"),
    "work": Key("work", "hash", "tokens that answered jobs asked for, those read, and their states", "-", "commit",
                "API"),
    "tally": Key("tally", "hash", "attempts, reaped leases, and times by what took them, label and bound",
                 "-", "claim more free reap delete, webhook sender", "API (metrics)"),
    "events": Key("events:", "string", "how many webhook events of job <id> there are, so that DELETE finds them",
                  "7 days", "finish", "delete"),
    "delivery": Key("delivery:", "hash", "webhook delivery <id>: its line of the log", "7 days once it is settled",
                    "finish, API, webhook sender", "webhook sender, API"),
    "told": Key("told:", "string", "what delivery <id> tells, JSON", "7 days, gone once delivered or erased",
                "finish, API", "webhook sender"),
    "outbox": Key("outbox:", "zset", "pending delivery ids of a <tenant> by when they are due", "-",
                  "finish, API, webhook sender", "webhook sender"),
    "outboxes": Key("outboxes", "zset", "tenants by when their outbox is served next", "-",
                    "finish, API, webhook sender", "webhook sender"),
    "hooks_due": Key("hooks:due", "zset", "outbox of earlier versions: '<job id>:<event>' by when it is due", "-",
                     "nobody any more", "webhook sender"),
    "hooks_open": Key("hooks_open:", "hash", "bytes of the pending deliveries of a <tenant>, and their total", "-",
                      "finish, API, webhook sender", "API (limit)"),
    "hooks_of": Key("hooks_of:", "zset", "delivery ids of a <tenant> by creation, the newest 10,000", "7 days",
                    "finish, API, webhook sender", "API"),
    "hook_secret": Key("hook_secret:", "string", "secret for the URLs that jobs of a <tenant> name", "-",
                       "webhook sender, API", "webhook sender, API"),
    "endpoints": Key("endpoints:", "hash", "webhook endpoints of a <tenant>, JSON, by id", "-", "API",
                     "webhook sender, API"),
    # files and batches: docs/adr/0013
    "file": Key("file:", "hash", "file <id>: tenant, purpose, name, bytes, how many pieces, how many batches read it",
                "the file's", "file_add batch_add batch_step", "API, feeder"),
    "files": Key("files:", "zset", "file ids of a <tenant> by creation", "an id goes with its file, when listed",
                 "file_add batch_step file_drop", "API (list)"),
    "piece": Key("piece:", "string", "a piece of a file, by digest of file and number: '=text' or '@<file> <bytes>'",
                 "its file's; 1 h before there is one", "piece_put batch_step", "API, feeder, sweep"),
    "batch": Key("batch:", "hash", "batch <id>: status, times, counts, cursor, fence of its feeder",
                 "30 days from its end", "batch_add batch_claim batch_step batch_cancel", "API, feeder"),
    "batches": Key("batches:", "zset", "batch ids of a <tenant> by creation", "an id goes with its batch, when listed",
                   "batch_add", "API (list)"),
    "flight": Key("flight:", "hash", "lines of batch <id> that are jobs now: '<job id> <bytes>'",
                  "deleted at its end", "batch_step", "feeder"),
    "labels": Key("labels:", "hash", "of those lines custom_id and the names of what is asked, JSON",
                  "deleted at its end", "batch_step", "feeder"),
    "feed": Key("feed:", "zset", "open batches of a <tenant> by when they are looked at next", "-",
                "batch_add batch_claim batch_step batch_cancel", "batch_claim"),
    "feeds": Key("feeds", "zset", "tenants by when one of their batches is looked at next", "-",
                 "batch_add batch_claim batch_step batch_cancel", "batch_claim"),
    "folder": Key("folder", "string", "name of this queue's folder of large states", "-", "API", "API"),
    "count": Key("count:", "hash", "request <id> to count: what a job would store", "10 s", "API", "worker"),
    "counts": Key("counts:", "list", "ids of requests to count, for any worker or one of <revision>", "10 s", "API",
                  "worker"),
    "counted": Key("counted:", "list", "what was found for request <id>", "10 s", "worker", "API"),
    "done": Key("done", "channel", "'<job id> <status>' at every change of a job", "-", "every script", "API"),
}  # fmt: skip


class Keys:
    """The keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        self.prefix = f"d3:{{{namespace}}}:"

    def __call__(self, name: KeyName, part: str = "") -> str:
        """The full key."""
        return self.prefix + TABLE[name].stem + part

    @property
    def broker_prefix(self) -> str:
        """What kombu puts before its own keys; `mq` repeats it, so both are in one place."""
        return self.prefix + "mq:"


def lua_prelude(names: Iterable[str] = TABLE) -> str:
    """Lua that defines `K(name, part)` from the same table, for these names; scripts get the prefix as KEYS[1].

    Every run of a script makes its table anew, so it has no key that the script does not use.
    """
    stems = ", ".join(f"{name} = '{TABLE[name].stem}'" for name in TABLE if name in set(names))
    return (
        f"local STEM = {{ {stems} }}\n"
        "local function K(name, part)\n"
        "  return KEYS[1] .. (STEM[name] or error('no such key: ' .. name)) .. (part or '')\n"
        "end\n"
    )
