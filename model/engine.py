"""DecisionEngine: jobs in, typed answers out. The only door of this room that a worker uses."""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Self, Unpack

import numpy as np
import torch
from pydantic import JsonValue

from d3serve.errors import (
    D3ServeError,
    DeviceError,
    InvalidRequest,
    MaxTokensExceeded,
    OutOfDeviceMemory,
    UnsupportedModality,
)
from d3serve.model.assembly import EngineParts, LoadOptions, assemble
from d3serve.model.backbone import PassInputs
from d3serve.model.buckets import ROW_SIZES, Bucket
from d3serve.model.deciding import NOBODY, Decides, Decision, Tell, Watch, decide_by_passes
from d3serve.model.device_faults import watched
from d3serve.model.graphs import GraphCache
from d3serve.model.media import Medium
from d3serve.model.media_prompt import PlacedMedia
from d3serve.model.pace import Pace
from d3serve.model.packing import Asked, Bounds, Packer
from d3serve.model.passes import DecidedJob, JobReadout, Pass, PinnedPass, Placing, PreparedJob, note
from d3serve.model.plan import PassRows, plan_rows
from d3serve.model.prompt import (
    Prompts,
    Tokens,
    check_length,
    sift,
    state_text,
)
from d3serve.model.readout import read_probabilities
from d3serve.model.state_cache import CacheStats
from d3serve.schemas.questions import NoulQuestion, Question

__all__ = ["DecidedJob", "DecisionEngine", "PreparedJob"]

# A pass that the host launches, its keys cut and merged; and one whose state takes the dense attention.
WARM_UP_ROWS = (4096, 32_768)
REHEARSED_QUESTION = 256  # rows at most: longer ones are not cut
REHEARSAL = "rehearsal"  # the state key of jobs that warm up; a real one is a digest
LONG_ROWS = 8192  # from here on a pass calls `at_yield`: the 27B on an H200 takes 0.7 s for so many


class DecisionEngine(Decides[PreparedJob, DecidedJob]):
    """Answers jobs with one checkpoint on one device. `decisions` is for one thread; `prepare` for any."""

    def __init__(self, parts: EngineParts) -> None:
        """Answer with what was assembled."""
        plan, backbone = parts.plan, parts.backbone
        self.info = parts.info
        self.backbone = backbone
        self.cache = parts.cache
        self.pass_rows = min(plan.pass_rows, plan.rows - plan.beside_rows)
        self._plan = plan
        self._pass_tokens, self._pass_questions = parts.pass_tokens, parts.pass_questions
        self._suspended = False  # whether a long pass waits between two steps
        self._config = parts.config
        self._format = parts.format
        self._shape = backbone.attention_shape(causal=parts.config.attention_mode == "causal")
        self._graphs = GraphCache(backbone) if backbone.ops.captures else None

    @classmethod
    def load(cls, model: str, **options: Unpack[LoadOptions]) -> Self:
        """Load a package from a folder or the Hub and allocate the state cache; `LoadOptions` says what can be asked.

        Raises:
            InvalidCheckpoint, InvalidSettings, DeviceError: as `assemble`.
        """
        return cls(assemble(model, options))

    @property
    def cache_stats(self) -> CacheStats:
        """Hits, misses and evictions since the start."""
        return self.cache.stats

    @property
    def cached_bytes(self) -> int:
        """Memory of the device that cached states take."""
        return self.cache.used_bytes

    @property
    def cache_size_bytes(self) -> int:
        """Memory of the device that is there for states."""
        return self.cache.size_bytes

    def device_memory(self) -> tuple[int, int] | None:
        """Bytes of the GPU's memory in use, by whoever uses it, and all of them; None on a CPU.

        Takes 5 us on an H200, and waits for no kernel. For the thread of `decisions`: a call of another one would
        break a CUDA graph that is being captured.

        Raises:
            DeviceError: the accelerator failed.
        """
        device = self._shape.device
        if device.type != "cuda":
            return None
        with watched(device):
            free, total = torch.cuda.mem_get_info(device)
        return total - free, total

    def cached_state_keys(self) -> list[str]:
        """Keys of the states that need not be read again, least recently used first."""
        return self.cache.keys()

    def prepare(
        self,
        state: JsonValue,
        questions: Mapping[str, Question],
        *,
        media: Sequence[Medium] = (),
        salt: str = "",
        max_tokens: int | None = None,
        partial: bool = False,
    ) -> PreparedJob:
        """Tokenize a job, on the CPU.

        Args:
            state: text, or JSON that is rendered as it stands; None and "" are the empty state.
            questions: at least one.
            media: images and videos that the state shows; all images are read first, each kind in its order.
            salt: jobs with different salts never share a state.
            max_tokens: longest prompt, within the model's own limit; None means the validated length.
            partial: set questions aside that are refused, as long as one is left.

        Raises:
            UnsupportedModality: the model does not read such a medium.
            InvalidRequest: there is no question, or the state is no JSON or no Unicode text.
            InvalidQuestion: a question cannot be rendered; `field` names it.
            MaxTokensExceeded: a prompt is too long; `field` names its question. Nothing is ever truncated.
        """
        if not questions:
            raise InvalidRequest("a job needs at least one question", field="questions")
        self._check_media(media)
        limit = min(self.info.validated_length if max_tokens is None else max_tokens, self.info.max_length)
        self._check_state(state, limit)
        asked, refused = sift(
            questions, lambda name: self._check_question(name, questions[name], limit), partial
        )
        prompts = self._format.build(state, asked, media)
        lengths = dict(zip(asked, prompts.lengths, strict=True))
        fitting, too_long = sift(asked, lambda name: check_length(name, lengths[name], limit), partial)
        prompts = prompts.only([name in fitting for name in asked])
        return self._prepared(prompts, fitting, refused | too_long, len(questions), salt)

    def _prepared(
        self,
        prompts: Prompts,
        asked: Mapping[str, Question],
        refused: Mapping[str, D3ServeError],
        count: int,
        salt: str,
    ) -> PreparedJob:
        """A job of what is asked, with the keys of its states; where whole prompts are read, each is one block."""
        states = prompts.own_states or (prompts.state,)
        key = self._state_key(states[0], salt, prompts.media)
        state, blocks, own_states = prompts.state, prompts.questions, prompts.own_states
        if not self._config.shares_state:
            leads = own_states or (state,) * len(asked)
            blocks = tuple(map(np.concatenate, zip(leads, blocks, strict=True)))
            state, own_states = state[:0], ()
        return PreparedJob(
            key,
            state,
            asked,
            blocks,
            own_states=own_states,
            own_keys=tuple(self._state_key(each, salt) for each in own_states),
            refused=refused,
            asked_for=count,
            media=prompts.media,
        )

    def _check_media(self, media: Sequence[Medium]) -> None:
        for medium in media:
            if medium.kind not in self.info.modalities:
                raise UnsupportedModality(
                    f"{self.info.name} reads {' and '.join(self.info.modalities)}; the state has a {medium.kind}",
                    field=f"{medium.kind}s",
                )

    def _check_state(self, state: JsonValue, limit: int) -> None:
        text = state_text(state)
        if (least := self._format.floor.over(limit, text)) is not None:
            raise MaxTokensExceeded(
                f"the state has at least {least} tokens, over the limit of {limit}",
                field="state",
                details={"tokens": least, "limit": limit},
            )

    def _check_question(self, name: str, question: Question, limit: int) -> None:
        instructions, options = self._format.texts(name, question)
        if (least := self._format.floor.over(limit, "\n".join((instructions, *options)))) is not None:
            check_length(name, least, limit)

    def _state_key(self, state: Tokens, salt: str, placed: PlacedMedia | None = None) -> str:
        digest = hashlib.sha256()
        media = (medium.identity for medium in placed.media) if placed else ()
        for part in (self.info.identity, salt, *media):
            digest.update(f"{len(part.encode())}:{part}".encode())  # no salt may run into the state
        digest.update(state.tobytes())
        return digest.hexdigest()

    @property
    def beside_tokens(self) -> int:
        """Rows, states and questions together, that may be decided between the steps of a long pass."""
        return self._plan.beside_rows

    def decisions(
        self, jobs: Sequence[PreparedJob], watch: Watch = NOBODY
    ) -> Iterator[list[Decision[DecidedJob]]]:
        """Answer jobs together, pass by pass; yield what each pass has finished.

        Each distinct state is read at most once as long as the pools hold it, and company changes no answer.

        Args:
            jobs: as `prepare` made them.
            watch: asked before each pass, and between the steps of a long one, every 10 to 40 ms on an H200. From
                there jobs of up to `beside_tokens` may be decided: both calls' answers have the bits that they have
                alone. A pass that is given up leaves nothing behind.

        Raises:
            DeviceError: the accelerator failed.
        """
        self.cache.begin_turn()
        readouts = [JobReadout(job) for job in jobs]
        packer = Packer(jobs, self._bounds(), self.cache.holds)
        return decide_by_passes(
            packer, partial(self._run_pass, readouts), lambda job: readouts[job].decided(), watch
        )

    def _bounds(self) -> Bounds:
        """What a pass may hold now; beside a long one, what that leaves."""
        plan = self._plan
        rows, states = self.pass_rows, plan.slots - plan.beside_slots
        if self._suspended:
            rows, states = plan.beside_rows, plan.beside_slots
        tokens, questions = self._pass_tokens, self._pass_questions
        return Bounds(
            rows, states, rows if tokens is None else tokens, sys.maxsize if questions is None else questions
        )

    def _run_pass(
        self, readouts: Sequence[JobReadout], asked: Sequence[Asked], tell: Tell
    ) -> tuple[int, Exception | None]:
        """Run a pass; a state whose questions give no numbers is forgotten, since it may be what broke them."""
        held = 0
        try:
            with watched(self._shape.device):
                filled = Placing([each.job for each in readouts], self.cache, self._bounds().rows).place(
                    asked
                )
                held = len(filled.asked)
                with PinnedPass(filled, self.cache) as pinned:
                    found = self._probabilities(readouts, filled, pinned.scratch, tell)
                for each, probabilities in zip(filled.asked, found, strict=True):
                    if probabilities is None:
                        self.cache.forget(each.cost.state_key)
        except DeviceError:
            raise
        except Exception as error:  # a pass's fault is a job's, which the packer finds out
            return held, error
        note(filled, found, readouts)
        return held, None

    @torch.inference_mode()
    def _probabilities(
        self, readouts: Sequence[JobReadout], filled: Pass, scratch: int, tell: Tell
    ) -> list[list[float] | None]:
        rows = plan_rows(filled.states, filled.rows, scratch)
        jobs = [readouts[each.job].job for each in filled.asked]
        try:
            return read_probabilities(
                self._hidden(rows, tell)[: len(rows.readout_rows)],
                self.backbone.weights.readout,
                [job.options[each.question] for job, each in zip(jobs, filled.asked, strict=True)],
                [self._config.temperature_for(job.asked_for) for job in jobs],
            )
        except torch.OutOfMemoryError as error:
            message = (
                f"{len(rows.tokens)} rows of {len(filled.asked)} questions do not fit the device: {error}"
            )
            raise OutOfDeviceMemory(message) from error

    def _hidden(self, rows: PassRows, tell: Tell) -> torch.Tensor:
        """Run a planned pass, as a CUDA graph if it is small; hidden states of its readout rows, and maybe of more."""
        cut = self.backbone.ops.cut_attention(rows.segments, self._shape)
        # A graph reads tokens alone: features of media would have to be written into it.
        bucket = Bucket.of(rows, cut.partials) if self._graphs is not None and not rows.media else None
        inputs = PassInputs.build(self.backbone.ops, rows, cut, self._shape, bucket=bucket)
        if len(rows.tokens) >= LONG_ROWS and not self._suspended:
            return self._in_steps(inputs, tell)
        if self._graphs is None or bucket is None:
            return self.backbone.forward(inputs)
        return self._graphs.forward(bucket, inputs)

    def _in_steps(self, inputs: PassInputs, tell: Tell) -> torch.Tensor:
        """Run a long pass, one step ahead of the device, and call `tell` with the share done between two steps."""
        steps, pace = self.backbone.steps(inputs), Pace(inputs.tokens.device)
        total, done = self.backbone.work(inputs), 0
        self._suspended = True
        try:
            while True:
                try:
                    done += next(steps)
                except StopIteration as end:
                    hidden: torch.Tensor = end.value
                    return hidden
                pace.wait()
                tell(done / total)
        finally:
            self._suspended = False

    def warm_up(self) -> None:
        """Compile kernels and capture graphs before a client can wait for them.

        On a GPU: a new state and a cached one, one question and four, at every size of small pass; a pass
        that the host launches; a state long enough for the library's dense attention; images and a video, where
        the model reads them. Where no graph is captured, fla tunes itself by the first pass: that is the longest.
        Empties the cache.

        Raises:
            OutOfDeviceMemory, DeviceError: as `decide`.
        """
        on_gpu, captures = self.backbone.pools.k.is_cuda, self._graphs is not None
        small, large = ROW_SIZES if captures else ROW_SIZES[:1], WARM_UP_ROWS if on_gpu else ()
        if not captures and large:
            self._rehearse(large[-1], 4, read_state=True)
        for rows, questions in product(small, (1, 4)):
            for read_state in (True, True, False, False):  # a graph is captured when its sizes come again
                self._rehearse(rows, questions, read_state=read_state)
        for rows in large:
            self._rehearse(rows, 4, read_state=True)
        if on_gpu and self.backbone.tower:
            self.backbone.tower.warm_up()
        self.cache.forget(REHEARSAL)
        self.cache.stats = CacheStats()

    def _rehearse(self, rows: int, questions: int, *, read_state: bool) -> None:
        """Decide a made-up job of `rows` tokens, if the pools and a pass hold so many."""
        if rows > min(self.cache.rows, self.pass_rows):
            return
        if read_state:
            self.cache.forget(REHEARSAL)
        self.decide([_rehearsal(rows, questions)])


def _rehearsal(rows: int, questions: int) -> PreparedJob:
    """Make up a job of `rows` tokens, up to half of them in its questions."""
    block = np.zeros(min(rows // 2 // questions, REHEARSED_QUESTION), dtype=np.int32)
    state = np.zeros(rows - len(block) * questions, dtype=np.int32)
    asked: dict[str, Question] = {str(n): NoulQuestion(type="noul") for n in range(questions)}
    return PreparedJob(REHEARSAL, state, asked, (block,) * questions)
