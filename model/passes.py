"""Fills passes with the questions of a batch: what the pools hold at once goes into one pass.

Bookkeeping between jobs and the state cache; no tensors.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

from d3serve.errors import D3ServeError, InvalidModelOutput, OutOfDeviceMemory
from d3serve.model.media_prompt import PlacedMedia
from d3serve.model.plan import QuestionRows, StatePlace, StateRows
from d3serve.model.prompt import Tokens
from d3serve.model.ranges import Entry
from d3serve.model.state_cache import StateCache
from d3serve.schemas import Usage
from d3serve.schemas.questions import Answer, Question


@dataclass(frozen=True)
class PreparedJob:
    """A tokenized job; opaque outside the engine but for its sizes and its state key.

    `state_key` is equal for jobs that can share one reading of their state. Where a layout gives each
    question a state block of its own, `state` is empty and `own_states` and `own_keys` hold them. `refused` holds
    why questions of a partial job are not asked; `asked_for` counts them too, since a temperature may depend on it.
    """

    state_key: str
    state: Tokens = field(repr=False)
    by_name: Mapping[str, Question]
    blocks: tuple[Tokens, ...] = field(repr=False)
    own_states: tuple[Tokens, ...] = field(default=(), repr=False)
    own_keys: tuple[str, ...] = field(default=(), repr=False)
    refused: Mapping[str, D3ServeError] = field(default_factory=dict)
    asked_for: int = 0
    media: PlacedMedia | None = field(default=None, repr=False)  # what the state shows

    def __post_init__(self) -> None:
        """Count the questions, unless the client asked for more."""
        object.__setattr__(self, "asked_for", self.asked_for or len(self.blocks))

    @property
    def state_tokens(self) -> int:
        """Length of the state block; 0 where prompts share nothing."""
        return len(self.state)

    @property
    def questions(self) -> int:
        """How many questions."""
        return len(self.blocks)

    @property
    def input_tokens(self) -> int:
        """The sum of the questions' whole prompts."""
        states = sum(map(len, self.own_states)) + len(self.state) * len(self.blocks)
        return sum(map(len, self.blocks)) + states

    def batches(self, max_tokens: int, max_questions: int) -> list[Self]:
        """Cut the job between questions into jobs within both bounds, or of one question."""
        cuts, tokens = [0], len(self.state)
        for index, block in enumerate(self.blocks):
            cost = len(block) + (len(self.own_states[index]) if self.own_states else 0)
            if index > cuts[-1] and (tokens + cost > max_tokens or index - cuts[-1] >= max_questions):
                cuts.append(index)
                tokens = len(self.state)
            tokens += cost
        return [self._part(slice(*ends)) for ends in pairwise([*cuts, len(self.blocks)])]

    def _part(self, chosen: slice) -> Self:
        return replace(
            self,
            by_name=dict(list(self.by_name.items())[chosen]),
            blocks=self.blocks[chosen],
            own_states=self.own_states[chosen],
            own_keys=self.own_keys[chosen],
        )


@dataclass(frozen=True)
class DecidedJob:
    """A job's answers, in the order of its questions, what they cost, and the questions that got none."""

    answers: dict[str, Answer]
    usage: Usage
    failed: dict[str, D3ServeError] = field(default_factory=dict)


@dataclass(eq=False)
class Findings:
    """What passes have found out about one job so far: probabilities by the question's index, None for no numbers."""

    job: PreparedJob
    probabilities: dict[int, list[float] | None] = field(default_factory=dict)
    computed_tokens: int = 0
    read_state: bool = False

    def decided(self) -> DecidedJob:
        """Type the answers, once every question has been asked."""
        job, answers, failed = self.job, dict[str, Answer](), dict[str, D3ServeError]()
        for index, (name, question) in enumerate(job.by_name.items()):
            if (probabilities := self.probabilities[index]) is None:
                message = f"the model produced numbers that are no probabilities for question {name!r}"
                failed[name] = InvalidModelOutput(message, field=f"questions.{name}")
            else:
                answers[name] = question.answer(probabilities)
        usage = Usage(
            input_tokens=job.input_tokens,
            computed_tokens=self.computed_tokens,
            state_tokens=job.state_tokens,
            media_tokens=job.media.tokens if job.media else 0,
            state_cached=job.state_tokens > 0 and not self.read_state,
            questions=job.questions,
        )
        return DecidedJob(answers, usage, failed)


@dataclass(frozen=True, eq=False)
class Asked:
    """One question of a job."""

    findings: Findings
    index: int

    @property
    def block(self) -> Tokens:
        """The question's token ids."""
        return self.findings.job.blocks[self.index]

    @property
    def state(self) -> Tokens:
        """The state block that stands before the question."""
        job = self.findings.job
        return job.own_states[self.index] if job.own_states else job.state

    @property
    def state_key(self) -> str:
        """What questions must share to share a state."""
        job = self.findings.job
        return job.own_keys[self.index] if job.own_keys else job.state_key

    @property
    def media(self) -> PlacedMedia | None:
        """What the state shows."""
        return self.findings.job.media

    @property
    def question(self) -> Question:
        """The question itself."""
        return list(self.findings.job.by_name.values())[self.index]


@dataclass
class Pass:
    """One pass: the states it reads, the questions it asks and the cache entries it keeps pinned."""

    states: list[StateRows] = field(default_factory=list)
    readers: list[Findings] = field(default_factory=list)  # the job that each state is read for
    rows: list[QuestionRows] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    fresh: list[Entry] = field(default_factory=list)
    pinned: list[Entry] = field(default_factory=list)
    question_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Rows so far."""
        return sum(len(state.tokens) for state in self.states) + self.question_tokens


class Batch:
    """The jobs of one `decide`, grouped by state, and the passes that answer them."""

    def __init__(
        self, jobs: Sequence[PreparedJob], cache: StateCache, *, pass_rows: int, pass_states: int
    ) -> None:
        """Group `jobs` by state key, in order of arrival; no pass will have more than `pass_rows` rows.

        No pass will pin more than `pass_states` states.
        """
        self.findings = [Findings(job) for job in jobs]
        self._cache = cache
        self.pass_rows = pass_rows
        self._pass_states = pass_states
        self._pass_questions = sum(job.questions for job in jobs)
        self._groups: dict[str, deque[Asked]] = {}
        for each in self.findings:
            for index in range(len(each.job.blocks)):
                asked = Asked(each, index)
                self._groups.setdefault(asked.state_key, deque()).append(asked)

    def passes(self) -> Iterator[Pass]:
        """Yield passes until every question has been asked; finish each before taking the next.

        Raises:
            OutOfDeviceMemory: a question does not fit the device even alone.
        """
        while self._groups:
            filling = Pass()
            for key, group in list(self._groups.items()):
                self._admit(filling, group)
                if group:
                    break  # the pools are full
                del self._groups[key]
            if not filling.asked:
                raise self._too_large(next(iter(self._groups.values()))[0])
            yield filling

    def take_back(self, failed: Pass) -> bool:
        """Ask the questions of a pass again that ran out of memory, half as many at a time; False if it had but one."""
        if len(failed.asked) < 2:
            return False
        self._pass_questions = len(failed.asked) // 2
        for asked in reversed(failed.asked):
            asked.findings.computed_tokens -= len(asked.block)
            self._groups.setdefault(asked.state_key, deque()).appendleft(asked)
        for reader, state in zip(failed.readers, failed.states, strict=True):
            reader.read_state = False
            reader.computed_tokens -= len(state.tokens)
        return True

    def _admit(self, filling: Pass, group: deque[Asked]) -> None:
        """Place a group's state and take its questions while the pools have rows for them."""
        first = group[0]
        entry = fresh = None
        if len(first.state):
            if len(filling.pinned) == self._pass_states:
                return
            entry = self._cache.acquire(first.state_key)
            if entry is None and self._has_room(filling, len(first.state) + len(first.block)):
                delta = first.media.delta if first.media else 0
                entry = fresh = self._cache.reserve(first.state_key, len(first.state), delta)
            if entry is None:
                return
        place = StatePlace(entry.start, entry.length, entry.slot, entry.delta) if entry else None
        before, unread = len(filling.asked), len(first.state) if fresh else 0
        while group and self._has_room(filling, unread + len(group[0].block)):
            if not self._cache.scratch_fits(filling.question_tokens + len(group[0].block)):
                break
            asked = group.popleft()
            filling.asked.append(asked)
            filling.rows.append(QuestionRows(asked.block, place, None if place else asked.media))
            filling.question_tokens += len(asked.block)
            asked.findings.computed_tokens += len(asked.block)
        if entry is None:
            return
        if len(filling.asked) == before:
            self._cache.release(entry)
            return
        filling.pinned.append(entry)
        if fresh is not None and place is not None:
            filling.fresh.append(fresh)
            filling.states.append(StateRows(first.state, place, first.media))
            filling.readers.append(first.findings)
            first.findings.read_state = True
            first.findings.computed_tokens += len(first.state)

    def _has_room(self, filling: Pass, rows: int) -> bool:
        return len(filling.asked) < self._pass_questions and filling.tokens + rows <= self.pass_rows

    def _too_large(self, asked: Asked) -> OutOfDeviceMemory:
        sizes = {
            "state_tokens": len(asked.state),
            "question_tokens": len(asked.block),
            "cache_rows": self._cache.rows,
            "pass_rows": self.pass_rows,
        }
        return OutOfDeviceMemory(
            "a state of {state_tokens} tokens and a question of {question_tokens} do not fit this device: it holds "
            "passes of {pass_rows} rows and a state cache of {cache_rows}".format(**sizes),
            details=sizes,
        )


class PinnedPass:
    """Holds a pass's scratch rows and pins: on a clean exit its states become findable, else they vanish."""

    def __init__(self, filled: Pass, cache: StateCache) -> None:
        """Manage `filled`'s entries in `cache`."""
        self._pass = filled
        self._cache = cache
        self.scratch = -1

    def __enter__(self) -> Self:
        start = self._cache.reserve_scratch(self._pass.question_tokens)
        if start is None:
            raise OutOfDeviceMemory("scratch rows that were planned are no longer free")
        self.scratch = start
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._cache.release_scratch(self.scratch, self._pass.question_tokens)
        if kind is None:
            for entry in self._pass.fresh:
                self._cache.publish(entry)
        else:
            for entry in self._pass.pinned:
                self._cache.forget(entry.key)  # a cached state may be what broke the numbers
        for entry in self._pass.pinned:
            self._cache.release(entry)
