"""Which prepared jobs go into one pass. Pure: no Redis, no tensors."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from d3serve.worker.engines import Prepared


class HasPrepared(Protocol):
    """Something that carries a prepared job."""

    @property
    def prepared(self) -> Prepared:
        """The job, tokenized."""
        ...


T = TypeVar("T", bound=HasPrepared)


def question_tokens(job: Prepared) -> int:
    """Tokens that a job adds to a pass in which its state is at hand."""
    return job.input_tokens - job.questions * job.state_tokens


def plan_passes(
    jobs: Iterable[T], cached: frozenset[str], *, max_tokens: int, max_questions: int
) -> list[Sequence[T]]:
    """Split jobs into passes within both budgets, keeping their order and so their states together.

    A state costs its tokens once, in the first pass that reads it, and nothing if it is `cached`. A job
    that alone exceeds a budget gets a pass of its own: the engine decides whether it fits.
    """
    passes: list[list[T]] = [[]]
    known, tokens, questions = set(cached), 0, 0
    for item in jobs:
        job = item.prepared
        cost = question_tokens(job) + (0 if job.state_key in known else job.state_tokens)
        full = tokens + cost > max_tokens or questions + job.questions > max_questions
        if passes[-1] and full:
            passes.append([])
            tokens = questions = 0
        passes[-1].append(item)
        known.add(job.state_key)
        tokens, questions = tokens + cost, questions + job.questions
    return [chosen for chosen in passes if chosen]
