"""From packages to padded batches of states that fan out to questions, tokenized as they are served.

States are padded on the left, so that their last tokens, which linear layers hand on to questions, line up;
questions are padded on the right, where causal layers and masks never look.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
import torch
from demo.index import Package
from demo.questions import OPTIONS, Asked, Asker, Rng, draw_state
from demo.teacher import Teacher
from demo.vocabulary import line_ends, load_vocabulary
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from d3serve.model.prompt import build_prompts, option_texts, state_part

STEP = 32  # lengths are padded to whole chunks of the gated delta rule
AFTER_OPTIONS = 4  # line ends of the prompt after the last option's
CHOICES = ("section", "section", "language", "role", "interface", "summary", "name", "depends")
SCORES = ("size", "needs", "needed")


@dataclass(frozen=True)
class Sample:
    """One state's tokens and its questions' blocks; `options` marks where each option's line ends."""

    state: NDArray[np.int32]
    blocks: tuple[NDArray[np.int32], ...]
    counts: tuple[int, ...]
    truths: tuple[int, ...]
    targets: tuple[NDArray[np.float32], ...]
    options: tuple[NDArray[np.int64], ...]
    package: Package
    orders: tuple[
        tuple[int, ...], ...
    ] = ()  # of every second question: its options as indices of the one before


@dataclass(frozen=True)
class Batch:
    """Tensors of B states with Q questions each; `tags` is -1 where a package has none."""

    states: Tensor  # [B, S]
    state_lengths: Tensor  # [B]
    questions: Tensor  # [B, Q, N]
    lengths: Tensor  # [B, Q]
    counts: Tensor  # [B, Q]
    truths: Tensor  # [B, Q]
    targets: Tensor  # [B, Q, OPTIONS] what training aims at
    options: Tensor  # [B, Q, OPTIONS] rows of the option lines' last tokens
    orders: Tensor  # [B, Q // 2, OPTIONS], or [B, 0, OPTIONS]
    section: Tensor  # [B, sections] what training aims at, zeros where unnamed
    tags: Tensor  # [B, tags]

    @property
    def tokens(self) -> int:
        """Tokens that are no padding."""
        return int(self.state_lengths.sum() + self.lengths.sum())

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        return type(self)(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))


class Tokenizing:
    """Renders and tokenizes with the serving code; shared by training and evaluation."""

    def __init__(
        self, folder: Path, packages: Sequence[Package], teacher: Teacher | None = None, tag_floor: int = 25
    ) -> None:
        self.teacher = teacher or Teacher()
        self.tokenizer, codes, self.vocab_size = load_vocabulary(folder)
        self.codes = [code for code, _ in codes]
        self.token_ids = [index for _, index in codes]
        self.closing = self.tokenizer.encode_tails([""])[0]
        self._is_line_end = np.zeros(self.vocab_size, dtype=bool)
        self._is_line_end[line_ends(folder)] = True
        common = Counter(tag for package in packages for tag in package.tags)
        self.tags = {tag: i for i, tag in enumerate(t for t, n in sorted(common.items()) if n >= tag_floor)}

    def text_ids(self, text: str) -> list[int]:
        """Ids of a piece of a question that begins where a token begins."""
        return self.tokenizer.encode_tails([text])[0][: -len(self.closing)]

    def state_ids(self, state: object) -> list[int]:
        """Ids of a state block, but for a last token that may join what follows."""
        ids = self.tokenizer.encode(state_part(state).rstrip()).ids  # type: ignore[arg-type]
        return ids[: -len(self.closing)]

    def ends_line(self, token: int) -> bool:
        """Whether a token's text ends with a newline."""
        return bool(self._is_line_end[token])

    def reset_tokens(self) -> list[int]:
        """Tokens with which a line of a question begins: the first codes, the headings' ends, the request."""
        words = [*self.codes[:OPTIONS], "Reply", ":\n"]
        return [self.token(word) for word in words]

    def question_token(self) -> int:
        """The first token after a state."""
        return self.token("Question")

    def blank_tokens(self) -> list[int]:
        """Tokens of nothing but newlines."""
        return [self.token(text) for text in ("\n", "\n\n")]

    def mute_tokens(self) -> list[int]:
        """Tokens that mark the prompt's form and mean nothing by themselves."""
        ends = np.flatnonzero(self._is_line_end).tolist()
        return [*ends, *self.reset_tokens(), self.question_token(), self.token("Options")]

    def token(self, text: str) -> int:
        """The first token of a text."""
        return self.text_ids(text)[0]

    def sample(self, package: Package, state: object, asked: Sequence[Asked]) -> Sample:
        """Tokenize one state with its questions."""
        questions = {str(index): each.question for index, each in enumerate(asked)}
        prompts = build_prompts(self.tokenizer, self.codes, state, questions)  # type: ignore[arg-type]
        counts = tuple(len(option_texts(each.question)) for each in asked)
        marks = tuple(
            self._marks(block, count) for block, count in zip(prompts.questions, counts, strict=True)
        )
        truths = tuple(each.truth for each in asked)
        targets = tuple(self.teacher.answer(package, each) for each in asked)
        return Sample(prompts.state, prompts.questions, counts, truths, targets, marks, package)

    def _marks(self, block: NDArray[np.int32], count: int) -> NDArray[np.int64]:
        """Rows of a question block where its option lines end."""
        ends = self._is_line_end[block]
        ends[:-1] &= ~ends[1:]
        rows = np.flatnonzero(ends)
        return rows[len(rows) - AFTER_OPTIONS - count : len(rows) - AFTER_OPTIONS]

    def batch(self, samples: Sequence[Sample]) -> Batch:
        """Pad samples with equally many questions into one batch."""
        size, questions = len(samples), len(samples[0].blocks)
        state_length = _round_up(max(len(s.state) for s in samples))
        length = _round_up(max(len(block) for s in samples for block in s.blocks))
        states = np.zeros((size, state_length), dtype=np.int64)
        blocks = np.zeros((size, questions, length), dtype=np.int64)
        options = np.zeros((size, questions, OPTIONS), dtype=np.int64)
        pairs = questions // 2 if samples[0].orders else 0
        orders = np.tile(np.arange(OPTIONS), (size, pairs, 1))
        tags = np.full((size, len(self.tags)), -1.0, dtype=np.float32)
        for row, s in enumerate(samples):
            states[row, state_length - len(s.state) :] = s.state
            for column, (block, marks) in enumerate(zip(s.blocks, s.options, strict=True)):
                blocks[row, column, : len(block)] = block
                options[row, column, : len(marks)] = marks
            for column, order in enumerate(s.orders):
                orders[row, column, : len(order)] = order
            if s.package.tags:
                tags[row] = 0.0
                tags[row, [self.tags[tag] for tag in s.package.tags if tag in self.tags]] = 1.0
        section = [self.teacher.section(s.package) for s in samples]
        arrays = (
            states, [len(s.state) for s in samples], blocks, [[len(b) for b in s.blocks] for s in samples],
            [s.counts for s in samples], [s.truths for s in samples], [s.targets for s in samples], options, orders, section, tags,
        )  # fmt: skip
        return Batch(*(torch.as_tensor(np.asarray(array)) for array in arrays))


class TrainingBatches(IterableDataset[Batch]):
    """Endless batches of about `tokens` padded tokens; every worker walks its own order of the packages."""

    def __init__(self, tokenizing: Tokenizing, packages: Sequence[Package], tokens: int, seed: int) -> None:
        self._tokenizing, self._packages, self._tokens, self._seed = tokenizing, packages, tokens, seed
        self._asker = Asker(packages)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        rng = np.random.default_rng([self._seed, info.id if info else 0])
        pool_size = min(len(self._packages), 1024)
        while True:
            order = rng.permutation(len(self._packages))
            for start in range(0, len(order), pool_size):
                pool = [self._packages[int(index)] for index in order[start : start + pool_size]]
                yield from self._batches(pool, rng)

    def _batches(self, pool: Sequence[Package], rng: Rng) -> Iterator[Batch]:
        wide = [package for package in pool if rng.random() < 0.6]
        chosen = {package.name for package in wide}
        narrow = [package for package in pool if package.name not in chosen]
        groups = [
            self._group([self._wide(p, rng) for p in wide]),
            self._group([self._narrow(p, rng) for p in narrow]),
        ]
        batches = [batch for group in groups for batch in group]
        for index in rng.permutation(len(batches)):
            yield self._tokenizing.batch(batches[int(index)])

    def _group(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Samples of like length together, each group within the token budget."""
        group: list[Sample] = []
        width = 0
        for sample in sorted(samples, key=lambda s: (_round_up(max(map(len, s.blocks))), len(s.state))):
            rows = _round_up(len(sample.state)) + len(sample.blocks) * _round_up(max(map(len, sample.blocks)))
            if group and max(width, rows) * (len(group) + 1) > self._tokens:
                yield group
                group, width = [], 0
            group.append(sample)
            width = max(width, rows)
        if group:
            yield group

    def _wide(self, package: Package, rng: Rng) -> Sample:
        """Three choices, each in two orders of its options."""
        asked = []
        for index in range(3):
            family = "section" if index == 0 else CHOICES[int(rng.integers(len(CHOICES)))]
            asked.append(
                self._asker.ask(package, family, rng) or _sure(self._asker.ask(package, "name", rng))
            )
        orders = [tuple(map(int, rng.permutation(len(option_texts(each.question))))) for each in asked]
        pairs = [
            each for one, order in zip(asked, orders, strict=True) for each in (one, one.reordered(order))
        ]
        left_out = [name for name in ("name", "summary") if rng.random() < (0.3 if name == "name" else 0.1)]
        sample = self._tokenizing.sample(package, self._state(package, rng, left_out), pairs)
        return Sample(**(vars(sample) | {"orders": tuple(orders)}))

    def _narrow(self, package: Package, rng: Rng) -> Sample:
        """Yes/no questions and scores."""
        asked = [self._asker.ask(package, "noul", rng) for _ in range(9)]
        asked += [self._asker.ask(package, family, rng) for family in SCORES]
        known = [each for each in asked if each is not None]
        known += [_sure(self._asker.ask(package, SCORES[i % 3], rng)) for i in range(len(asked) - len(known))]
        left_out = ["name"] if rng.random() < 0.3 else []
        return self._tokenizing.sample(package, self._state(package, rng, left_out), known)

    @staticmethod
    def _state(package: Package, rng: Rng, left_out: Sequence[str]) -> object:
        """Now and then nothing is known of a package: the answer is then how often each one is true."""
        return None if rng.random() < 0.015 else draw_state(package, rng, leave_out=left_out)


def _sure(asked: Asked | None) -> Asked:
    if asked is None:
        raise ValueError("this family of questions always has an answer")
    return asked


def _round_up(length: int) -> int:
    return -(-length // STEP) * STEP
