"""A request as the job table stores it: byte-faithful texts, the state group, the lane, the estimates. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core
from pydantic import TypeAdapter

from d3serve.errors import IdempotencyKeyReused
from d3serve.media.files import MediaFile, join_state
from d3serve.media.sizes import MediaKind
from d3serve.schemas import DecisionRequest, JobOptions, Lane, State, WebhookTarget
from d3serve.schemas.questions import Question
from d3serve.settings import Settings

# One step of priority is worth this much waiting: a low job older than a normal one by more goes first.
PRIORITY_STEP_MS = 30_000
MAX_ATTEMPTS = 3  # a job that ends so many workers is their end
TOMBSTONE_TTL_S = 7 * 86_400  # an expired job answers 410, not 404, for as long as a result may be kept
PRIORITY_RANK = {"high": -1, "normal": 0, "low": 1}
FINGERPRINT = 1  # one more with each change of how it is made: those kept, for a day, are then not compared
QUESTIONS: TypeAdapter[dict[str, Question]] = TypeAdapter(dict[str, Question])
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class EncodedRequest:
    """A validated request as texts: what takes long of `encode_job`, done where it holds nobody up.

    Token counts are estimates; `tokens` counts the questions without the state, `longest_tokens` the longest of them.
    """

    model: str
    options: JobOptions
    state: bytes
    state_digest: str
    questions: bytes
    count: int
    longest_tokens: int
    text_bytes: int  # of the state, without what it shows
    media_tokens: int = 0
    kinds: frozenset[MediaKind] = frozenset()  # of what the state shows

    @property
    def state_tokens(self) -> int:
        """About how many tokens the state has."""
        return tokens_in(self.text_bytes) + self.media_tokens

    @property
    def tokens(self) -> int:
        """About how many tokens all questions have."""
        return tokens_in(len(self.questions))

    @property
    def fingerprint(self) -> str:
        """What two requests share if they ask for the same, behind the version of how that is told."""
        asked = hashlib.sha256(self.questions).hexdigest()
        options = self.options.model_dump_json(exclude_defaults=True)
        whole = to_json([self.model, options, self.state_digest, asked])
        return f"{FINGERPRINT}:{hashlib.sha256(whole.encode()).hexdigest()}"


@dataclass(frozen=True)
class EncodedJob:
    """What SUBMIT takes. `tokens` counts the questions without the state; both counts are estimates.

    A field that would be empty is left out.
    """

    group: str
    lane: Lane
    rank_offset_ms: int
    expires_ms: int
    state: bytes
    questions: bytes
    fields: dict[str, str | int]


def to_json(value: Any) -> str:
    """JSON text that keeps key order and every character; the prompt is made from it."""
    return _JSON.encode(value)


def encode_state(state: State) -> bytes:
    """A state as it is stored: a text as it is, after a `=`; anything else as JSON. Long ones are copied once."""
    return b"=" + state.encode() if isinstance(state, str) else pydantic_core.to_json(state)


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has: four bytes of UTF-8 each, near enough for English and Chinese.

    Good for lanes and budgets; the worker counts for real.
    """
    return tokens_in(len(text.encode("utf-8")))


def tokens_in(size_bytes: int) -> int:
    """The estimate for a text of so many bytes."""
    return size_bytes // 4 + 1


def state_group(model: str, revision: str, tenant: str, state_digest: str) -> str:
    """What two jobs must share to share a state; tenants never do, so none can time another's cache.

    A worker claims whole groups, so jobs that name a revision never share one with jobs that name another or none.
    """
    return hashlib.sha256(to_json([model, revision, tenant, state_digest]).encode()).hexdigest()[:40]


def choose_lane(settings: Settings, request: EncodedRequest) -> Lane:
    """The lane asked for, else the one whose prompts, and whose jobs, are this long."""
    if request.options.lane is not None:
        return request.options.lane
    prompt, job = request.state_tokens + request.longest_tokens, request.state_tokens + request.tokens
    short = prompt <= settings.max_interactive_tokens and job <= settings.max_job_tokens_interactive
    return "interactive" if short else "offline"


def _hook_events(webhook: WebhookTarget | None) -> str:
    """The events that SUBMIT's `finish` looks for: none, all, or a list between commas."""
    if webhook is None:
        return ""
    return "*" if not webhook.events else "," + ",".join(webhook.events) + ","


def encode_request(request: DecisionRequest, files: Sequence[MediaFile] = ()) -> EncodedRequest:
    """The texts of a validated request, and the files that its state shows with it."""
    asked = [to_json(q.model_dump(mode="json", exclude_unset=True)) for q in request.questions.values()]
    named = ",".join(f"{to_json(name)}:{text}" for name, text in zip(request.questions, asked, strict=True))
    state = encode_state(request.state)
    digest = hashlib.sha256(state)
    for file in files:
        digest.update(f"{file.kind}:{file.digest}".encode())
    return EncodedRequest(
        model=request.model,
        options=request.job,
        state=join_state(state, files) if files else state,
        state_digest=digest.hexdigest(),
        questions=f"{{{named}}}".encode(),
        count=len(asked),
        longest_tokens=max(map(estimate_tokens, asked), default=0),
        text_bytes=len(state),
        media_tokens=sum(file.most_tokens for file in files),
        kinds=frozenset(file.kind for file in files),
    )


def encode_job(
    settings: Settings,
    request: EncodedRequest,
    *,
    tenant: str,
    revision: str = "",
    traceparent: str | None = None,
) -> EncodedJob:
    """Everything that SUBMIT writes, from a request whose model is resolved."""
    options = request.options
    fields: dict[str, str | int] = {
        "model": request.model,
        "revision": revision,
        "state_tokens": request.state_tokens,
        "tokens": request.tokens,
        "questions": request.count,
        "priority": options.priority,
        "metadata": to_json(options.metadata),
        "webhook": to_json(options.webhook.model_dump(mode="json")) if options.webhook else "",
        "hook_events": _hook_events(options.webhook),
        "on_error": options.on_question_error,
        "asked_lane": options.lane or "",
        "timeout_ms": 1000 * (options.timeout_s or 0),
        "ttl_ms": 1000 * min(options.result_ttl_s or settings.result_ttl_s, settings.max_result_ttl_s),
        "tomb_ms": 1000 * TOMBSTONE_TTL_S,
        "max_attempts": MAX_ATTEMPTS,
        "traceparent": traceparent or "",
    }
    return EncodedJob(
        group=state_group(request.model, revision, tenant, request.state_digest),
        lane=choose_lane(settings, request),
        rank_offset_ms=PRIORITY_STEP_MS * PRIORITY_RANK[options.priority],
        expires_ms=1000 * (options.expires_in_s or 0),
        state=request.state,
        questions=request.questions,
        fields={name: value for name, value in fields.items() if value != ""},
    )


def key_reused(fingerprint: str, first: str, firsts: str) -> IdempotencyKeyReused:
    """The error for a key under which another fingerprint is kept, which may have been made in another way."""
    if firsts.rpartition(":")[0] == fingerprint.rpartition(":")[0]:
        told = "with another body"
    else:
        told = "before an upgrade of this service, which cannot tell whether the body is the same"
    return IdempotencyKeyReused(
        f"this Idempotency-Key came before, for job {first}, {told}", details={"job_id": first}
    )


def decode_state(text: str) -> State:
    """The state that `encode_state` wrote."""
    if text.startswith("="):
        return text[1:]
    state: State = json.loads(text)
    return state


def decode_questions(text: str) -> Mapping[str, Question]:
    """The questions that `encode_job` wrote, in their order."""
    return QUESTIONS.validate_json(text, strict=True)
