"""What a worker tells of a job's way to whoever collects traces: spans of the trace that its submission began.

A job that is part of none, as where the API is not traced, has no spans. They carry ids and numbers, never a text.
"""

from collections.abc import Sequence

from d3serve import tracing
from d3serve.schemas import Usage
from d3serve.store.turns import ClaimedJob

Span = tuple[float, float]  # when it began and ended, by this host's clock


def tell_claimed(jobs: Sequence[ClaimedJob]) -> None:
    """Tell how long jobs waited, and that they are claimed."""
    if not tracing.is_on():
        return
    for job in jobs:
        began, ended = job.claiming
        waits_from = min(job.created_ms / 1000, began)  # by Redis' clock, which may be ahead of ours
        tracing.tell("queue", job.traceparent, (waits_from, began), _about(job))
        received = _about(job) | {
            "messaging.system": "d3serve",
            "messaging.operation.name": "claim",
            "messaging.operation.type": "receive",
            "messaging.destination.name": job.lane,
            "messaging.message.id": job.id,
        }
        tracing.tell("claim", job.traceparent, (began, ended), received, kind="consumer")


def tell_tokenized(job: ClaimedJob, during: Span, tokens: int) -> None:
    """Tell that a job's texts became so many tokens."""
    if tracing.is_on():
        tracing.tell("tokenize", job.traceparent, during, {**_about(job), "d3serve.tokens": tokens})


def tell_pass(jobs: Sequence[ClaimedJob], during: Span) -> None:
    """Tell of a pass in the trace of each of its jobs. The first that is told links to all; the others' link to it.

    So each can be found from each other, with as many links as there are jobs, not with their square.
    """
    if not tracing.is_on():
        return
    links, first = [job.traceparent for job in jobs], True
    for job in jobs:
        about = {**_about(job), "d3serve.jobs": len(jobs), "gen_ai.request.model": job.model}
        told = tracing.tell("pass", job.traceparent, during, about, links=links)
        if told is not None and first:
            links, first = [told], False


def tell_committed(
    job: ClaimedJob, during: Span, outcome: str, usage: Usage | None = None, code: str | None = None
) -> None:
    """Tell how a job ended; `code` is that of its error."""
    if not tracing.is_on():
        return
    about = {**_about(job), "d3serve.outcome": outcome}
    if usage is not None:
        about |= {
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "d3serve.questions": usage.questions,
            "d3serve.state_tokens": usage.state_tokens,
            "d3serve.computed_tokens": usage.computed_tokens,
            "d3serve.state_cached": usage.state_cached,
        }
    tracing.tell("commit", job.traceparent, during, about, error=code)


def _about(job: ClaimedJob) -> tracing.Attributes:
    return {"d3serve.job_id": job.id, "d3serve.lane": job.lane, "d3serve.attempt": job.attempt}
