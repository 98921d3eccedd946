"""An engine of known speed and repeatable answers, for benchmarks, demonstrations and fault tests.

Model string: `fake:?state_ms=100&ktoken_ms=0&question_ms=10&prepare_ms=0&cache=64&load_s=0&trace=/path&faults=1`. To
prepare a job sleeps `prepare_ms` for each thousand tokens of its state. A pass sleeps `state_ms` for each state it has
to read, `ktoken_ms` for each thousand tokens of those, and `question_ms` for each question. With `yield_ms` it yields
so often, and may then have `beside_tokens` beside it. With `faults=1`, a state that holds `fake:kill`,
`fake:memory-error`, `fake:oom`, `fake:device-error`, `fake:crash` or `fake:sleep=<seconds>` makes the pass do that, and
one that holds `fake:nan` gets no numbers, as does a question that does. `trace` names a file that gets one JSON line
for each pass.
"""

import hashlib
import json
import os
import re
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl

from d3serve.errors import (
    D3ServeError,
    DeviceError,
    InvalidCheckpoint,
    InvalidModelOutput,
    MaxTokensExceeded,
    OutOfDeviceMemory,
)
from d3serve.schemas import ModelInfo, Usage
from d3serve.schemas.questions import Answer, Question
from d3serve.store.encode import estimate_tokens, to_json

FAULT = re.compile(r"fake:(kill|memory-error|oom|device-error|crash|sleep=([0-9.]+))")


@dataclass(frozen=True)
class FakeOptions:
    """What the model string sets."""

    name: str = "fake"
    state_ms: float = 0
    ktoken_ms: float = 0
    question_ms: float = 0
    prepare_ms: float = 0
    yield_ms: float = 0
    beside_tokens: int = 2048
    cache: int = 64
    load_s: float = 0
    load_error: str = ""
    faults: int = 0
    trace: str = ""
    max_length: int = 131_072


@dataclass(frozen=True)
class FakePrepared:
    """A job as the fake engine holds it."""

    state_key: str
    state_tokens: int
    input_tokens: int
    state: str
    asked: Mapping[str, Question]
    refused: Mapping[str, D3ServeError] = field(default_factory=dict)

    @property
    def questions(self) -> int:
        """How many questions."""
        return len(self.asked)

    def batches(self, max_tokens: int, max_questions: int) -> list[Self]:
        """The job cut between questions into jobs within both bounds, or of one question."""
        each = (self.input_tokens - self.questions * self.state_tokens) // self.questions
        count = max(1, min(max_questions, (max_tokens - self.state_tokens) // max(1, each)))
        items = list(self.asked.items())
        parts = [dict(items[start : start + count]) for start in range(0, len(items), count)]
        return [
            replace(self, asked=part, input_tokens=(each + self.state_tokens) * len(part)) for part in parts
        ]


@dataclass(frozen=True)
class FakeDecided:
    """A job that the fake engine has answered."""

    answers: dict[str, Answer]
    usage: Usage
    failed: Mapping[str, D3ServeError]


class FakeEngine:
    """Answers come from a hash of state and question, so they do not depend on company or order."""

    def __init__(self, options: FakeOptions) -> None:
        self._options = options
        self._cache: OrderedDict[str, None] = OrderedDict()
        self._suspended = False
        self.info = ModelInfo(
            name=options.name, identity=f"fake {options.name}", attention_mode="fake", validated_length=32_768,
            max_length=options.max_length, dtype="float64", device="cpu",
        )  # fmt: skip

    @classmethod
    def load(cls, model: str) -> Self:
        """Parse the model string.

        Raises:
            InvalidCheckpoint: an unknown option, or as `load_error` asks.
        """
        given = dict(parse_qsl(model.partition("?")[2], strict_parsing="?" in model))
        kinds = {name: type(value) for name, value in asdict(FakeOptions()).items()}
        if unknown := given.keys() - kinds.keys():
            raise InvalidCheckpoint(f"the fake engine has no option {min(unknown)}")
        options = FakeOptions(**{name: kinds[name](value) for name, value in given.items()})
        time.sleep(options.load_s)
        if options.load_error == "checkpoint":
            raise InvalidCheckpoint("the fake checkpoint is broken, as asked")
        if options.load_error:
            raise OSError("the fake checkpoint cannot be read, as asked")
        return cls(options)

    def cached_state_keys(self) -> frozenset[str]:
        """States that the next pass need not read again."""
        return frozenset(self._cache)

    def prepare(
        self,
        state: Any,
        questions: Mapping[str, Question],
        *,
        salt: str = "",
        max_tokens: int | None = None,
        partial: bool = False,
    ) -> FakePrepared:
        """Count tokens by length.

        Raises:
            MaxTokensExceeded: `field` names the question.
        """
        text = to_json(state)
        state_tokens, total = estimate_tokens(text), 0
        time.sleep(state_tokens / 1000 * self._options.prepare_ms / 1000)
        limit = min(max_tokens or self._options.max_length, self._options.max_length)
        asked, refused = dict(questions), dict[str, D3ServeError]()
        for name, question in questions.items():
            length = state_tokens + estimate_tokens(question.model_dump_json())
            if length <= limit:
                total += length
                continue
            refused[name] = MaxTokensExceeded(
                f"question {name!r} needs {length} tokens, {limit} are allowed", field=f"questions.{name}"
            )
            del asked[name]
            if not partial or not asked:
                raise next(iter(refused.values()))
        key = hashlib.sha256(f"{salt}\0{text}".encode()).hexdigest()
        return FakePrepared(key, state_tokens, total, text, asked, refused)

    @property
    def beside_tokens(self) -> int:
        """Tokens that a call of `decide` from `at_yield` may have."""
        return self._options.beside_tokens if self._options.yield_ms else 0

    def decide(
        self, jobs: Sequence[FakePrepared], *, at_yield: Callable[[float], None] | None = None
    ) -> list[FakeDecided]:
        """Sleep as long as a pass would take, then answer.

        Raises:
            OutOfDeviceMemory: one job is too large for what runs beside a long pass.
        """
        for job in jobs:
            if self._suspended and job.state_tokens > self.beside_tokens:
                raise OutOfDeviceMemory(
                    f"the job has more than the {self.beside_tokens} tokens left beside it"
                )
            if self._options.faults:
                _misbehave(job.state)
        fresh = {job.state_key: job.state_tokens for job in jobs if job.state_key not in self._cache}
        began = time.time()
        questions = sum(job.questions for job in jobs)
        spent_ms = len(fresh) * self._options.state_ms + sum(fresh.values()) / 1000 * self._options.ktoken_ms
        self._work((spent_ms + questions * self._options.question_ms) / 1000, at_yield)
        self._trace(jobs, list(fresh), began)
        unread, decided = set(fresh), []
        for job in jobs:
            decided.append(
                _answer(job, cached=job.state_key not in unread, faults=bool(self._options.faults))
            )
            unread.discard(job.state_key)
            self._remember(job.state_key)
        return decided

    def _work(self, seconds: float, at_yield: Callable[[float], None] | None) -> None:
        if at_yield is None or not self._options.yield_ms:
            time.sleep(seconds)
            return
        done, self._suspended = 0.0, True
        try:
            while done < seconds:
                step = min(self._options.yield_ms / 1000, seconds - done)
                time.sleep(step)
                done += step
                at_yield(done / seconds)
        finally:
            self._suspended = False

    def _remember(self, key: str) -> None:
        self._cache[key] = None
        self._cache.move_to_end(key)
        while len(self._cache) > self._options.cache:
            self._cache.popitem(last=False)

    def _trace(self, jobs: Sequence[FakePrepared], fresh: list[str], began: float) -> None:
        if not self._options.trace:
            return
        states = sorted({job.state_key for job in jobs})
        line = {"pid": os.getpid(), "began": began, "ended": time.time(), "states": states, "fresh": fresh}
        with Path(self._options.trace).open("a") as trace:
            trace.write(json.dumps(line) + "\n")


def _misbehave(state: str) -> None:
    """Do what the state asks for."""
    for fault, seconds in FAULT.findall(state):
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "memory-error":
            raise MemoryError
        if fault == "oom":
            raise OutOfDeviceMemory("the job needs 99 GiB, the device has 1 GiB")
        if fault == "device-error":
            raise DeviceError("an illegal memory access was encountered")
        if fault == "crash":
            raise RuntimeError(state)
        time.sleep(float(seconds))


def _answer(job: FakePrepared, *, cached: bool, faults: bool) -> FakeDecided:
    answers, failed = dict[str, Answer](), dict[str, D3ServeError]()
    for name, question in job.asked.items():
        if faults and "fake:nan" in job.state + question.model_dump_json():
            failed[name] = InvalidModelOutput(
                f"the readout of question {name!r} holds NaN", field=f"questions.{name}"
            )
        else:
            answers[name] = question.answer(_weights(f"{job.state}\0{name}", len(question.options())))
    questions_only = job.input_tokens - job.questions * job.state_tokens
    usage = Usage(
        input_tokens=job.input_tokens,
        computed_tokens=questions_only + (0 if cached else job.state_tokens),
        state_tokens=job.state_tokens,
        state_cached=cached,
        questions=job.questions,
    )
    return FakeDecided(answers, usage, failed)


def _weights(seed: str, count: int) -> list[float]:
    """`count` shares that sum to one, always the same for a seed."""
    raw = [1 + hashlib.sha256(f"{seed}\0{i}".encode()).digest()[0] for i in range(count)]
    return [value / sum(raw) for value in raw]
