"""Which prepared jobs go into one batch, and one job out of its batches again. Pure: no Redis, no tensors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from d3serve.errors import D3ServeError
from d3serve.schemas import Usage
from d3serve.schemas.questions import Answer
from d3serve.worker.engines import Decided, Prepared


class HasPrepared(Protocol):
    """Something that carries a prepared job."""

    @property
    def prepared(self) -> Prepared:
        """The job, tokenized."""
        ...


T = TypeVar("T", bound=HasPrepared)


def question_tokens(job: Prepared) -> int:
    """Tokens that a job adds to a batch in which its state is at hand."""
    return job.input_tokens - job.questions * job.state_tokens


def plan_batches(
    jobs: Iterable[T], cached: frozenset[str], *, max_tokens: int, max_questions: int
) -> list[Sequence[T]]:
    """Split jobs into batches within both budgets, keeping their order and so their states together.

    A state costs its tokens once, in the first batch that reads it, and nothing if it is `cached`. A job
    that alone exceeds a budget gets a batch of its own: the engine decides whether it fits.
    """
    batches: list[list[T]] = [[]]
    known, tokens, questions = set(cached), 0, 0
    for item in jobs:
        job = item.prepared
        cost = question_tokens(job) + (0 if job.state_key in known else job.state_tokens)
        full = tokens + cost > max_tokens or questions + job.questions > max_questions
        if batches[-1] and full:
            batches.append([])
            tokens = questions = 0
        batches[-1].append(item)
        known.add(job.state_key)
        tokens, questions = tokens + cost, questions + job.questions
    return [chosen for chosen in batches if chosen]


@dataclass(frozen=True)
class Joined:
    """One job, answered in batches."""

    answers: Mapping[str, Answer]
    usage: Usage
    failed: Mapping[str, D3ServeError]


def spans(batches: Sequence[Prepared]) -> Iterator[tuple[float, float]]:
    """For each of a job's batches, which share of the work comes before it and which is its own."""
    costs = [question_tokens(batch) for batch in batches]
    costs[0] += batches[0].state_tokens
    done, total = 0, max(1, sum(costs))
    for cost in costs:
        yield done / total, cost / total
        done += cost


def joined(parts: Sequence[Decided]) -> Decided:
    """One job's batches as if they had been one; the first may have read the state for all."""
    if len(parts) == 1:
        return parts[0]
    usages = [part.usage for part in parts]
    usage = usages[0].model_copy(
        update={
            "input_tokens": sum(usage.input_tokens for usage in usages),
            "computed_tokens": sum(usage.computed_tokens for usage in usages),
            "questions": sum(usage.questions for usage in usages),
        }
    )
    answers = {name: answer for part in parts for name, answer in part.answers.items()}
    return Joined(answers, usage, {name: why for part in parts for name, why in part.failed.items()})
