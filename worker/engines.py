"""What a worker needs of an engine, and how it gets one: the real model, or a fake of known speed."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from d3serve.errors import D3ServeError
from d3serve.model.deciding import Decision, Watch
from d3serve.model.media import Medium
from d3serve.schemas import ModelInfo, Usage
from d3serve.schemas.questions import Answer, Question
from d3serve.settings import Settings
from d3serve.store.turns import TurnStore

FAKE_SCHEME = "fake:"


class Prepared(Protocol):
    """One job, tokenized; opaque but for these."""

    @property
    def state_key(self) -> str:
        """What two jobs share when they share a state."""
        ...

    @property
    def state_tokens(self) -> int:
        """Tokens of the state block."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of the state and the questions, the state counted once."""
        ...

    @property
    def prompt_tokens(self) -> Mapping[str, int]:
        """Tokens of the whole prompt of each question that is asked, by id."""
        ...

    @property
    def refused(self) -> Mapping[str, D3ServeError]:
        """Why questions of a partial job are not asked."""
        ...


class Decided(Protocol):
    """One job, answered."""

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Answers by question id."""
        ...

    @property
    def usage(self) -> Usage:
        """What it cost."""
        ...

    @property
    def failed(self) -> Mapping[str, D3ServeError]:
        """Why questions got no answer."""
        ...


class Engine(Protocol):
    """Turns states and questions into answers; one per process, used by one thread."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        ...

    def prepare(
        self,
        state: Any,
        questions: Mapping[str, Question],
        *,
        media: Sequence[Medium] = (),
        salt: str = "",
        max_tokens: int | None = None,
        partial: bool = False,
    ) -> Prepared:
        """Tokenize a job on the CPU; raises MaxTokensExceeded or InvalidQuestion, `field` naming the question.

        With `partial` the questions that are refused are set aside, as long as one is left.
        """
        ...

    @property
    def beside_tokens(self) -> int:
        """Tokens, states and questions together, that may be decided between the steps of a long pass; 0: none."""
        ...

    def decisions(self, jobs: Sequence[Any], watch: Watch) -> Iterator[Sequence[Decision[Decided]]]:
        """Answer jobs together, and yield what each pass has finished; raises DeviceError.

        `watch` is asked before each pass and between the steps of a long one; from there this may be called again.
        """
        ...

    def cached_state_keys(self) -> Collection[str]:
        """States that the next pass need not read again."""
        ...

    @property
    def cached_bytes(self) -> int:
        """Memory of the device that they take."""
        ...

    @property
    def cache_size_bytes(self) -> int:
        """Memory of the device that is there for states."""
        ...

    def device_memory(self) -> tuple[int, int] | None:
        """Bytes of the GPU's memory in use, by whoever uses it, and all of them; None on a CPU; raises DeviceError."""
        ...


def served_name(settings: Settings) -> str:
    """The name under which `load_engine` will serve, which a queue may refuse; nothing is loaded to know it."""
    if settings.model.startswith(FAKE_SCHEME):
        from d3serve.worker.fake_engine import read_options  # noqa: PLC0415 # as below

        return read_options(settings.model).name
    from d3serve.model import hub  # noqa: PLC0415 # brings the Hub's client into this process

    return hub.served_name(settings.model)


def load_engine(settings: Settings) -> Engine:
    """Load and warm up what `settings.model` names; minutes for a large checkpoint. Only here torch comes in.

    Raises:
        InvalidCheckpoint: the checkpoint is not one that we know how to serve.
    """
    if settings.model.startswith(FAKE_SCHEME):
        from d3serve.worker.fake_engine import FakeEngine  # noqa: PLC0415 # not in a production process

        return FakeEngine.load(
            settings.model,
            pass_tokens=settings.max_batch_tokens,
            pass_questions=TurnStore.max_batch_questions,
        )
    # Read as torch comes in. Chosen afterwards, `sum_rows_alike`'s library makes torch warn on stderr, from C++.
    os.environ["TORCH_BLAS_PREFER_CUBLASLT"] = "1"
    from d3serve.model.engine import DecisionEngine  # noqa: PLC0415 # brings torch into this process

    engine = DecisionEngine.load(
        settings.model,
        revision=settings.revision,
        device=settings.device,
        dtype=settings.dtype,
        state_cache_bytes=settings.state_cache_bytes,
        state_cache_host_bytes=settings.state_cache_host_bytes,
        state_cache_dir=settings.state_cache_dir,
        state_ttl_s=settings.result_ttl_s,
        load_format=settings.load_format,
        quantization=settings.quantization,
        linear_rule=settings.linear_rule,
        attention=settings.attention,
        pass_tokens=settings.max_batch_tokens,
        pass_questions=TurnStore.max_batch_questions,
        trust_remote_code=settings.trust_remote_code,
    )
    engine.warm_up()
    return engine
