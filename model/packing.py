"""What goes into a pass: decided here, by counting, and nowhere else. Pure: no tensors, no pools, no queue."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from operator import attrgetter
from typing import NamedTuple, Protocol

from d3serve.errors import OutOfDeviceMemory


class Cost(NamedTuple):
    """What a question costs a pass: its own tokens, and those of its state where that must be read."""

    tokens: int
    state_key: str
    state_tokens: int


class Packable(Protocol):
    """A tokenized job."""

    @property
    def state_key(self) -> str:
        """Equal for jobs that can share one reading of their state."""
        ...

    def costs(self) -> Iterable[Cost]:
        """Each question's cost, in order."""
        ...


class Asked(NamedTuple):
    """One question of one job; both count from 0."""

    job: int
    question: int
    cost: Cost
    work: int  # its tokens, and those of its state where it is the job's first about it


@dataclass(frozen=True)
class Bounds:
    """What a pass may hold. A first question always goes in: whether it fits alone, the pools know."""

    rows: int  # of states to read and questions together: the device holds no more
    states: int
    tokens: int  # as rows, since others wait meanwhile; a state that alone has more leaves its questions as much again
    questions: int


class Tally:
    """Counts what a pass would hold."""

    def __init__(self, bounds: Bounds, cached: Callable[[str], bool]) -> None:
        """Start with nothing; a state that is `cached` costs no rows."""
        self._bounds, self._cached = bounds, cached
        self._states: set[str] = set()
        self._rows = self._questions = 0
        self._excess = 0  # rows of a first state that has more than the token budget

    def take(self, asked: Sequence[Asked], *, of_first_job: bool) -> bool:
        """Count questions of one job in, if they all fit."""
        new = {each.cost.state_key: each.cost.state_tokens for each in asked if each.cost.state_tokens}
        new = {key: tokens for key, tokens in new.items() if key not in self._states}
        read = [tokens for key, tokens in new.items() if not self._cached(key)]
        first, bounds, excess = not self._questions, self._bounds, self._excess
        if first and read and read[0] > bounds.tokens:
            excess = read[0]
        rows = self._rows + sum(read) + sum(each.cost.tokens for each in asked)
        questions = self._questions + len(asked)
        fits = (
            questions <= bounds.questions
            and len(self._states) + len(new) <= bounds.states
            and rows <= bounds.rows
            and rows - (excess if of_first_job else 0) <= bounds.tokens
        )
        if fits or (first and len(asked) == 1):
            self._rows, self._questions, self._excess = rows, questions, excess
            self._states.update(new)
            return True
        return False


class Picked(NamedTuple):
    """The questions of a pass, and as shares of its jobs' work what was done before it and what is done in it."""

    asked: list[Asked]
    done: float
    part: float

    @property
    def jobs(self) -> list[int]:
        """The jobs that ask them."""
        return jobs_of(self.asked)


def jobs_of(asked: Iterable[Asked]) -> list[int]:
    """Each job once."""
    return list(dict.fromkeys(each.job for each in asked))


class Packer:
    """Hands out the questions of some jobs pass by pass, those of one state together.

    A job is cut only where it does not fit a pass alone. A lot is what may share passes: there is one, until a pass
    fails and the job at fault must be found.
    """

    def __init__(self, jobs: Sequence[Packable], bounds: Bounds, cached: Callable[[str], bool]) -> None:
        """Take `jobs` in order of arrival; a state that is `cached` need not be read."""
        self._bounds, self._cached = bounds, cached
        by_state: dict[str, list[int]] = {}
        for number, job in enumerate(jobs):
            by_state.setdefault(job.state_key, []).append(number)
        ordered = [number for numbers in by_state.values() for number in numbers]
        self._lots = deque([deque(asked for number in ordered for asked in _questions(number, jobs[number]))])
        self._left = [0] * len(jobs)  # questions
        self._work, self._done = [0] * len(jobs), [0] * len(jobs)
        for each in self._lots[0]:
            self._left[each.job] += 1
            self._work[each.job] += each.work

    def choose(self) -> Picked | None:
        """The questions of the next pass; None once there are none left. What does not run must be given back."""
        while self._lots and not self._lots[0]:
            self._lots.popleft()
        if not self._lots:
            return None
        tally, asked = Tally(self._bounds, self._cached), list[Asked]()
        for _, questions in groupby(self._lots[0], attrgetter("job")):
            job = list(questions)
            if tally.take(job, of_first_job=not asked):
                asked += job
                continue
            if not asked:
                asked = list(takewhile(lambda each: tally.take([each], of_first_job=True), job))
            break
        for _ in asked:
            self._lots[0].popleft()
        jobs = jobs_of(asked)
        total = max(1, sum(self._work[job] for job in jobs))
        done, part = sum(self._done[job] for job in jobs), sum(each.work for each in asked)
        return Picked(asked, done / total, part / total)

    def give_back(self, asked: Sequence[Asked]) -> None:
        """Ask these first in the next pass."""
        self._lots[0].extendleft(reversed(asked))

    def drop(self, jobs: Collection[int]) -> None:
        """Ask nothing more of these jobs."""
        self._lots = deque(deque(each for each in lot if each.job not in jobs) for lot in self._lots)

    def succeeded(self, asked: Sequence[Asked]) -> list[int]:
        """Note a pass; its jobs that have no question left."""
        for each in asked:
            self._left[each.job] -= 1
            self._done[each.job] += each.work
        return [job for job in jobs_of(asked) if not self._left[job]]

    def failed(self, asked: Sequence[Asked], error: Exception) -> list[int]:
        """Put a failed pass's questions back in smaller parts; the job at fault, once no other is left.

        Where memory ran out no pass asks more than half as many from now on. Else half of the jobs go into passes of
        their own, and so does the other half.
        """
        jobs = jobs_of(asked)
        if isinstance(error, OutOfDeviceMemory) and len(asked) > 1:
            self._bounds = replace(self._bounds, questions=len(asked) // 2)
            self.give_back(asked)
        elif len(jobs) > 1:
            halves: tuple[deque[Asked], deque[Asked]] = deque(), deque()
            for each in asked:
                halves[each.job in jobs[: len(jobs) // 2]].append(each)
            self._lots.extendleft(halves)
        else:
            self.drop(jobs)
            return jobs
        return []


def _questions(number: int, job: Packable) -> Iterator[Asked]:
    known = set[str]()
    for index, cost in enumerate(job.costs()):
        yield Asked(
            number, index, cost, cost.tokens + (cost.state_tokens if cost.state_key not in known else 0)
        )
        known.add(cost.state_key)
