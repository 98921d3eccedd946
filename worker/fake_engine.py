"""An engine of known speed and repeatable answers, for benchmarks, demonstrations and fault tests.

Model string: `fake:?state_ms=100&ktoken_ms=0&question_ms=10&prepare_ms=0&cache=64&load_s=0&trace=/path&faults=1`. To
prepare a job sleeps `prepare_ms` for each thousand tokens of its state. A pass sleeps `state_ms` for each state it has
to read, `ktoken_ms` for each thousand tokens of those, and `question_ms` for each question. With `yield_ms` it yields
so often, and may then have `beside_tokens` beside it. With `faults=1`, a state that holds `fake:kill`,
`fake:memory-error`, `fake:oom`, `fake:device-error`, `fake:crash`, `fake:sleep=<seconds>` or `fake:read=<path>` (a pipe
that somebody writes to when the pass may go on) makes the pass do that, and one that holds `fake:nan` gets no numbers,
as does a question that does. `trace` names a file that gets one JSON line for each pass.
"""

import hashlib
import json
import os
import re
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
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
from d3serve.model.deciding import NOBODY, Decides, Decision, Tell, Watch, decide_by_passes
from d3serve.model.packing import Asked, Bounds, Cost, Packer, jobs_of
from d3serve.schemas import ModelInfo, Usage
from d3serve.schemas.questions import Answer, Question
from d3serve.store.encode import estimate_tokens, to_json

FAULT = re.compile(r"fake:(kill|memory-error|oom|device-error|crash|sleep=([0-9.]+)|read=([\w./-]+))")


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
    """A job as the fake engine holds it; `lengths` are the questions' own tokens."""

    state_key: str
    state_tokens: int
    lengths: tuple[int, ...]
    state: str
    asked: Mapping[str, Question]
    refused: Mapping[str, D3ServeError] = field(default_factory=dict)

    @property
    def questions(self) -> int:
        """How many questions."""
        return len(self.asked)

    @property
    def prompt_tokens(self) -> dict[str, int]:
        """Tokens of each question's whole prompt."""
        return {name: self.state_tokens + own for name, own in zip(self.asked, self.lengths, strict=True)}

    @property
    def tokens(self) -> int:
        """Tokens of the state and the questions, the state counted once."""
        return self.state_tokens + sum(self.lengths)

    def costs(self) -> list[Cost]:
        """What each question costs a pass."""
        return [Cost(length, self.state_key, self.state_tokens) for length in self.lengths]


@dataclass(frozen=True)
class FakeDecided:
    """A job that the fake engine has answered."""

    answers: dict[str, Answer]
    usage: Usage
    failed: Mapping[str, D3ServeError]


@dataclass
class FakeReadout:
    """What passes have found out about one job."""

    job: FakePrepared
    read_state: bool = False

    def decided(self, *, faults: bool) -> FakeDecided:
        """Make the answers up."""
        job, answers, failed = self.job, dict[str, Answer](), dict[str, D3ServeError]()
        for name, question in job.asked.items():
            if faults and "fake:nan" in job.state + question.model_dump_json():
                failed[name] = InvalidModelOutput(
                    f"the readout of question {name!r} holds NaN", field=f"questions.{name}"
                )
            else:
                answers[name] = question.answer(_weights(f"{job.state}\0{name}", len(question.options())))
        usage = Usage(
            input_tokens=job.state_tokens * job.questions + sum(job.lengths),
            computed_tokens=sum(job.lengths) + (job.state_tokens if self.read_state else 0),
            state_tokens=job.state_tokens,
            state_cached=not self.read_state,
            questions=job.questions,
        )
        return FakeDecided(answers, usage, failed)


def read_options(model: str) -> FakeOptions:
    """Parse the model string.

    Raises:
        InvalidCheckpoint: an unknown option.
    """
    given = dict(parse_qsl(model.partition("?")[2], strict_parsing="?" in model))
    kinds = {name: type(value) for name, value in asdict(FakeOptions()).items()}
    if unknown := given.keys() - kinds.keys():
        raise InvalidCheckpoint(f"the fake engine has no option {min(unknown)}")
    return FakeOptions(**{name: kinds[name](value) for name, value in given.items()})


class FakeEngine(Decides[FakePrepared, FakeDecided]):
    """Answers come from a hash of state and question, so they do not depend on company or order."""

    def __init__(
        self, options: FakeOptions, pass_tokens: int = sys.maxsize, pass_questions: int = sys.maxsize
    ) -> None:
        self._options = options
        self._cache: OrderedDict[str, None] = OrderedDict()
        self._suspended = False
        self._pass_tokens, self._pass_questions = pass_tokens, pass_questions
        self.info = ModelInfo(
            name=options.name, identity=f"fake {options.name}", attention_mode="fake", validated_length=32_768,
            max_length=options.max_length, dtype="float64", device="cpu",
        )  # fmt: skip

    @classmethod
    def load(cls, model: str, *, pass_tokens: int = sys.maxsize, pass_questions: int = sys.maxsize) -> Self:
        """Parse the model string; a pass holds no more than the given tokens and questions.

        Raises:
            InvalidCheckpoint: an unknown option, or as `load_error` asks.
        """
        options = read_options(model)
        time.sleep(options.load_s)
        if options.load_error == "checkpoint":
            raise InvalidCheckpoint("the fake checkpoint is broken, as asked")
        if options.load_error:
            raise OSError("the fake checkpoint cannot be read, as asked")
        return cls(options, pass_tokens, pass_questions)

    def cached_state_keys(self) -> frozenset[str]:
        """States that the next pass need not read again."""
        return frozenset(self._cache)

    @property
    def cached_bytes(self) -> int:
        """As if each state took a mebibyte."""
        return len(self._cache) * 2**20

    @property
    def cache_size_bytes(self) -> int:
        """As if each state took a mebibyte."""
        return self._options.cache * 2**20

    def device_memory(self) -> None:
        """There is no GPU."""

    def prepare(
        self,
        state: Any,
        questions: Mapping[str, Question],
        *,
        media: Sequence[Any] = (),  # noqa: ARG002 # it reads none
        salt: str = "",
        max_tokens: int | None = None,
        partial: bool = False,
    ) -> FakePrepared:
        """Count tokens by length.

        Raises:
            MaxTokensExceeded: `field` names the question.
        """
        text = to_json(state)
        state_tokens, lengths = estimate_tokens(text), list[int]()
        time.sleep(state_tokens / 1000 * self._options.prepare_ms / 1000)
        limit = min(max_tokens or self._options.max_length, self._options.max_length)
        asked, refused = dict(questions), dict[str, D3ServeError]()
        for name, question in questions.items():
            own = estimate_tokens(question.model_dump_json())
            length = state_tokens + own
            if length <= limit:
                lengths.append(own)
                continue
            refused[name] = MaxTokensExceeded(
                f"question {name!r} needs {length} tokens, {limit} are allowed", field=f"questions.{name}"
            )
            del asked[name]
            if not partial or not asked:
                raise next(iter(refused.values()))
        key = hashlib.sha256(f"{salt}\0{text}".encode()).hexdigest()
        return FakePrepared(key, state_tokens, tuple(lengths), text, asked, refused)

    @property
    def beside_tokens(self) -> int:
        """Tokens that may be decided between the steps of a long pass."""
        return self._options.beside_tokens if self._options.yield_ms else 0

    def decisions(
        self, jobs: Sequence[FakePrepared], watch: Watch = NOBODY
    ) -> Iterator[list[Decision[FakeDecided]]]:
        """Sleep as long as each pass would take, then answer."""
        readouts = [FakeReadout(job) for job in jobs]
        tokens = min(self._pass_tokens, self.beside_tokens) if self._suspended else self._pass_tokens
        bounds = Bounds(sys.maxsize, sys.maxsize, tokens, self._pass_questions)
        packer = Packer(jobs, bounds, self._cache.__contains__)
        faults = bool(self._options.faults)
        return decide_by_passes(
            packer, partial(self._run_pass, readouts), lambda job: readouts[job].decided(faults=faults), watch
        )

    def _run_pass(
        self, readouts: Sequence[FakeReadout], asked: Sequence[Asked], tell: Tell
    ) -> tuple[int, Exception | None]:
        """Sleep through a pass; a job too large for what runs beside a long one is not held."""
        held, in_pass = 0, [readouts[job] for job in jobs_of(asked)]
        try:
            for each in asked:
                if self._suspended and each.cost.state_tokens > self.beside_tokens:
                    break
                held += 1
            if not held:
                raise OutOfDeviceMemory(
                    f"the job has more than the {self.beside_tokens} tokens left beside it"
                )
            self._pass(in_pass, asked[:held], tell)
        except DeviceError:
            raise
        except Exception as error:  # of a job, as faults=1 asks
            return held, error
        return held, None

    def _pass(self, in_pass: Sequence[FakeReadout], asked: Sequence[Asked], tell: Tell) -> None:
        if self._options.faults:
            for each in in_pass:
                _misbehave(each.job.state)
        states = {each.job.state_key: each.job.state_tokens for each in in_pass}
        fresh = {key: tokens for key, tokens in states.items() if key not in self._cache}
        began = time.time()
        spent_ms = len(fresh) * self._options.state_ms + sum(fresh.values()) / 1000 * self._options.ktoken_ms
        self._work((spent_ms + len(asked) * self._options.question_ms) / 1000, tell)
        self._trace(states, list(fresh), began)
        for each in in_pass:
            each.read_state |= fresh.pop(each.job.state_key, None) is not None
            self._remember(each.job.state_key)

    def _work(self, seconds: float, tell: Tell) -> None:
        if self._suspended or not self._options.yield_ms:
            time.sleep(seconds)
            return
        done, self._suspended = 0.0, True
        try:
            while done < seconds:
                step = min(self._options.yield_ms / 1000, seconds - done)
                time.sleep(step)
                done += step
                tell(done / seconds)
        finally:
            self._suspended = False

    def _remember(self, key: str) -> None:
        self._cache[key] = None
        self._cache.move_to_end(key)
        while len(self._cache) > self._options.cache:
            self._cache.popitem(last=False)

    def _trace(self, states: Iterable[str], fresh: list[str], began: float) -> None:
        if not self._options.trace:
            return
        line = {
            "pid": os.getpid(),
            "began": began,
            "ended": time.time(),
            "states": sorted(states),
            "fresh": fresh,
        }
        with Path(self._options.trace).open("a") as trace:
            trace.write(json.dumps(line) + "\n")


def _misbehave(state: str) -> None:
    """Do what the state asks for."""
    for fault, seconds, path in FAULT.findall(state):
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
        if path:
            Path(path).read_bytes()
        else:
            time.sleep(float(seconds))


def _weights(seed: str, count: int) -> list[float]:
    """`count` shares that sum to one, always the same for a seed."""
    raw = [1 + hashlib.sha256(f"{seed}\0{i}".encode()).digest()[0] for i in range(count)]
    return [value / sum(raw) for value in raw]
