"""From claimed jobs to tokenized ones: their states opened, their texts tokenized side by side."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from d3serve.errors import MaxTokensExceeded, StateLost
from d3serve.settings import Settings
from d3serve.store.encode import decode_questions
from d3serve.store.turns import ClaimedJob, Turn
from d3serve.worker import traces
from d3serve.worker.engines import Engine, Prepared
from d3serve.worker.shown import Opened, OpenState, StateOpener

LONG_TEXT = 50_000  # characters: from here on to tokenize takes 20 ms and more
THREADS = 8


@dataclass(frozen=True)
class Work:
    """One claimed job on its way through a turn; `tokenizing` is when that began and ended, by this host's clock."""

    job: ClaimedJob
    prepared: Prepared
    tokenizing: tuple[float, float]

    @property
    def tokenize_ms(self) -> float:
        """How long it took to make tokens of its texts."""
        began, ended = self.tokenizing
        return (ended - began) * 1000


@dataclass(frozen=True)
class OpenTurn:
    """A turn whose states are open, and what of its jobs is being tokenized, by id."""

    turn: Turn
    opened: Sequence[Opened]
    under_way: dict[str, Future[Work]] = field(default_factory=dict)


class Preparer:
    """Prepares jobs for one engine, from any thread."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._opener = StateOpener(engine.info.modalities)
        # The tokenizer lets other threads run; from here on more of them would wait for each other.
        self._threads = ThreadPoolExecutor(min(THREADS, max(2, os.cpu_count() or 1)), "d3serve-prepare")

    def close(self) -> None:
        """End what decodes media."""
        self._opener.close()

    def open(self, jobs: Sequence[ClaimedJob], fail: Callable[[ClaimedJob, Exception], None]) -> list[Opened]:
        """The jobs with their states, what these show being decoded.

        One whose state is gone, or holds what this worker does not read, is told to `fail`.
        """
        states: dict[str, OpenState] = {}
        found = []
        for job in jobs:
            try:
                if job.state is None:
                    raise StateLost("the state of this job is no longer stored; send the request again")
                if job.group not in states:
                    states[job.group] = self._opener.open(job.state)
                found.append((job, states[job.group]))
            except Exception as error:  # a job's fault must not fail its neighbours
                fail(job, error)
        return found

    def begin(self, job: ClaimedJob, opened: OpenState) -> Future[Work]:
        """Tokenize in a thread; as `prepare`."""
        return self._threads.submit(self.prepare, job, opened)

    def prepare(self, job: ClaimedJob, opened: OpenState) -> Work:
        """Tokenize; where the client asked for partial answers, questions that are refused are set aside.

        Raises:
            InvalidMedia: a file that its state shows.
            MaxTokensExceeded: a prompt, or the job as a whole.
        """
        opened.media()  # decoded first: that is not what is timed
        began = time.time()
        prepared = self.tokenize(job, opened)
        if (refusal := self.too_large(job, prepared)) is not None:
            raise refusal
        work = Work(job, prepared, (began, time.time()))
        traces.tell_tokenized(job, work.tokenizing, prepared.tokens)
        return work

    def tokenize(self, job: ClaimedJob, opened: OpenState) -> Prepared:
        """As `prepare`, whatever the tokens come to as a whole."""
        settings, interactive = self._settings, job.asked_lane == "interactive"
        longest = settings.max_interactive_tokens if interactive else settings.max_offline_tokens
        return self._engine.prepare(
            opened.state,
            decode_questions(job.questions),
            media=opened.media(),
            salt=job.tenant,
            max_tokens=longest,
            partial=job.partial,
        )

    def too_large(self, job: ClaimedJob, prepared: Prepared) -> MaxTokensExceeded | None:
        """Why a job is refused whose prompts all fit; None where it is not."""
        settings, tokens = self._settings, prepared.tokens
        interactive = job.asked_lane == "interactive"
        most = settings.max_job_tokens_interactive if interactive else settings.max_job_tokens_offline
        if tokens <= most:
            return None
        return MaxTokensExceeded(
            f"the job has {tokens} tokens, its state counted once; {most} are allowed in its lane",
            field="questions",
            details={"tokens": tokens, "limit": most},
        )


def is_long(job: ClaimedJob) -> bool:
    """Whether to tokenize it takes longer than a step of a pass."""
    return len(job.state or "") + len(job.questions) >= LONG_TEXT
