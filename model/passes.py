"""Jobs as an engine holds them, and the places of a pass's questions in the pools.

Bookkeeping between jobs and the state cache; no tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from d3serve.errors import D3ServeError, InvalidModelOutput, OutOfDeviceMemory
from d3serve.model.media_prompt import PlacedMedia
from d3serve.model.packing import Asked, Cost
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
        return sum(self.prompt_tokens.values())

    @property
    def prompt_tokens(self) -> dict[str, int]:
        """Tokens of each question's whole prompt."""
        prompts = enumerate(zip(self.by_name, self.blocks, strict=True))
        return {name: len(self.state_of(index)) + len(block) for index, (name, block) in prompts}

    @property
    def tokens(self) -> int:
        """Tokens of the state and the questions, the state counted once."""
        return sum(map(len, (self.state, *self.own_states, *self.blocks)))

    @cached_property
    def options(self) -> tuple[int, ...]:
        """How many options each question has."""
        return tuple(len(question.options()) for question in self.by_name.values())

    def costs(self) -> Iterator[Cost]:
        """What each question costs a pass, in order."""
        for index, block in enumerate(self.blocks):
            yield Cost(len(block), self.key_of(index), len(self.state_of(index)))

    def state_of(self, index: int) -> Tokens:
        """The state block that stands before a question."""
        return self.own_states[index] if self.own_states else self.state

    def key_of(self, index: int) -> str:
        """What questions must share to share a state."""
        return self.own_keys[index] if self.own_keys else self.state_key


@dataclass(frozen=True)
class DecidedJob:
    """A job's answers, in the order of its questions, what they cost, and the questions that got none."""

    answers: dict[str, Answer]
    usage: Usage
    failed: dict[str, D3ServeError] = field(default_factory=dict)


@dataclass(eq=False)
class JobReadout:
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


@dataclass
class Pass:
    """One pass: the states it reads, the questions it asks and the cache entries it keeps pinned."""

    asked: list[Asked] = field(default_factory=list)
    rows: list[QuestionRows] = field(default_factory=list)
    states: list[StateRows] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)  # the job that each state is read for
    fresh: dict[str, Entry] = field(default_factory=dict)  # by state key
    pinned: dict[str, Entry] = field(default_factory=dict)
    question_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Rows so far."""
        return sum(len(state.tokens) for state in self.states) + self.question_tokens


class Placing:
    """Places the questions of one pass in the pools."""

    def __init__(self, jobs: Sequence[PreparedJob], cache: StateCache, pass_rows: int) -> None:
        """Begin a pass of up to `pass_rows` rows."""
        self._jobs, self._cache, self._pass_rows = jobs, cache, pass_rows

    def place(self, asked: Sequence[Asked]) -> Pass:
        """Fill a pass with as many of the questions, from the first on, as the pools have rows for.

        Raises:
            OutOfDeviceMemory: not even the first fits the device.
        """
        filled = self._fill(asked)
        if not filled.asked:  # free rows may lie too scattered for one that would fit
            first = asked[0].cost
            fits = first.state_tokens + first.tokens <= min(self._pass_rows, self._cache.rows)
            if not fits or not self._cache.clear():
                raise self._too_large(first)
            filled = self._fill(asked)
        if not filled.asked:
            raise self._too_large(asked[0].cost)
        return filled

    def _fill(self, asked: Sequence[Asked]) -> Pass:
        filled = Pass()
        for each in asked:
            if not self._admit(filled, each):
                break
        return filled

    def _admit(self, filled: Pass, asked: Asked) -> bool:
        """Place a question, and its state if the pass does not hold it yet; False where there is no room."""
        job, cost = self._jobs[asked.job], asked.cost
        is_new = cost.state_tokens > 0 and cost.state_key not in filled.pinned
        if is_new and not self._pin(filled, asked):
            return False
        fits = filled.tokens + cost.tokens <= self._pass_rows
        if not fits or not self._cache.scratch_fits(filled.question_tokens + cost.tokens):
            if is_new:
                self._unpin(filled, cost.state_key)
            return False
        entry = filled.pinned.get(cost.state_key)
        place = _place_of(entry) if entry else None
        filled.asked.append(asked)
        filled.rows.append(QuestionRows(job.blocks[asked.question], place, None if place else job.media))
        filled.question_tokens += cost.tokens
        return True

    def _pin(self, filled: Pass, asked: Asked) -> bool:
        """Make a state part of a pass: it is cached, or read there for the job that asks first."""
        job, key, length = self._jobs[asked.job], asked.cost.state_key, asked.cost.state_tokens
        entry = self._cache.acquire(key)
        if entry is None:
            if filled.tokens + length + asked.cost.tokens > self._pass_rows:
                return False
            entry = self._cache.reserve(key, length, job.media.delta if job.media else 0)
            if entry is None:
                return False
            filled.fresh[key] = entry
            filled.states.append(StateRows(job.state_of(asked.question), _place_of(entry), job.media))
            filled.readers.append(asked.job)
        filled.pinned[key] = entry
        return True

    def _unpin(self, filled: Pass, key: str) -> None:
        """Take the state back that was pinned last."""
        if filled.fresh.pop(key, None):
            filled.states.pop()
            filled.readers.pop()
        self._cache.release(filled.pinned.pop(key))

    def _too_large(self, first: Cost) -> OutOfDeviceMemory:
        sizes = {
            "state_tokens": first.state_tokens,
            "question_tokens": first.tokens,
            "cache_rows": self._cache.rows,
            "pass_rows": self._pass_rows,
        }
        return OutOfDeviceMemory(
            "a state of {state_tokens} tokens and a question of {question_tokens} do not fit this device: it holds "
            "passes of {pass_rows} rows and a state cache of {cache_rows}".format(**sizes),
            details=sizes,
        )


def _place_of(entry: Entry) -> StatePlace:
    return StatePlace(entry.start, entry.length, entry.slot, entry.delta)


def note(filled: Pass, found: Sequence[list[float] | None], readouts: Sequence[JobReadout]) -> None:
    """Write down what a pass has found out about its jobs, and what it computed for them."""
    for asked, probabilities in zip(filled.asked, found, strict=True):
        readouts[asked.job].probabilities[asked.question] = probabilities
        readouts[asked.job].computed_tokens += asked.cost.tokens
    for job, state in zip(filled.readers, filled.states, strict=True):
        readouts[job].read_state = True
        readouts[job].computed_tokens += len(state.tokens)


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
            for entry in self._pass.fresh.values():
                self._cache.publish(entry)
        else:
            for key in self._pass.pinned:
                self._cache.forget(key)  # a cached state may be what broke the numbers
        for entry in self._pass.pinned.values():
            self._cache.release(entry)
