"""Endless batches of packages' states with questions about them, as the word model reads both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from demo.index import Package
from demo.prompts import Tokenizing
from demo.questions import OPTIONS, Asked, Asker, Rng, draw_state
from demo.teacher import Teacher
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from d3serve.model.prompt import DEFAULT_INSTRUCTIONS

CHOICES = ("section", "section", "language", "role", "interface", "summary", "name", "depends")
SCORES = ("size", "needs", "needed")
LINE_TOKENS = 16  # of a line that are averaged
RECENT = 0.2  # how much of a line's mean its newest token makes
STATES = 192  # of one step
ALIKE = 8  # steps whose states are sorted by length, so that little is padding
NOTHING = 0.015  # share of states of which nothing is known: the answer is then how often each one is true


@dataclass(frozen=True)
class WordBatch:
    """States, distinct lines, and questions as rows of lines."""

    states: Tensor  # [B, S] token ids, 0 where shorter
    state_weights: Tensor  # [B, S]
    lines: Tensor  # [L, LINE_TOKENS]
    line_weights: Tensor  # [L, LINE_TOKENS]
    options: Tensor  # [N, OPTIONS] rows of `lines`
    asks: Tensor  # [N] rows of `lines`
    counts: Tensor  # [N]
    truths: Tensor  # [N]
    targets: Tensor  # [N, OPTIONS] what training aims at
    owners: Tensor  # [N] rows of `states`
    sections: Tensor  # [B, sections] what training aims at, zeros where unnamed
    properties: Tensor  # [B, properties] 1 true, 0 false, -1 unknown

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        return type(self)(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))


class WordBatches(IterableDataset[WordBatch]):
    """Endless steps of STATES packages, six questions each."""

    def __init__(
        self, tokenizing: Tokenizing, asker: Asker, teacher: Teacher, packages: Sequence[Package], seed: int
    ) -> None:
        self._tokenizing, self._asker, self._teacher = tokenizing, asker, teacher
        self._packages, self._seed = packages, seed
        self._known_lines: dict[str, NDArray[np.int64]] = {}

    def __iter__(self) -> Iterator[WordBatch]:
        info = get_worker_info()
        rng = np.random.default_rng([self._seed, info.id if info else 0])
        while True:
            order = rng.permutation(len(self._packages))
            for start in range(0, len(order), ALIKE * STATES):
                pool = [self._packages[int(i)] for i in order[start : start + ALIKE * STATES]]
                pool.sort(key=lambda package: len(package.body))
                for first in rng.permutation(range(0, len(pool), STATES)):
                    yield self._batch(pool[first : first + STATES], rng)

    def _ask(self, package: Package, rng: Rng) -> list[Asked]:
        families = ["section", "noul", "noul", "noul", _one_of(CHOICES, rng), _one_of(SCORES, rng)]
        return [asked for family in families if (asked := self._asker.ask(package, family, rng)) is not None]

    def _line(self, text: str) -> NDArray[np.int64]:
        if text not in self._known_lines:
            ids = self._tokenizing.text_ids(text)
            self._known_lines[text] = np.array(ids[-LINE_TOKENS:], dtype=np.int64)
        return self._known_lines[text]

    def _batch(self, packages: Sequence[Package], rng: Rng) -> WordBatch:
        left_out = [["name"] if rng.random() < 0.3 else [] for _ in packages]
        states = [
            None if rng.random() < NOTHING else draw_state(p, rng, leave_out=names)
            for p, names in zip(packages, left_out, strict=True)
        ]
        return self.encode(packages, states, [self._ask(package, rng) for package in packages])

    def encode(
        self, packages: Sequence[Package], states: Sequence[object], asked: Sequence[Sequence[Asked]]
    ) -> WordBatch:
        """Packages' states with their questions as one batch."""
        rows: dict[str, int] = {}
        options, asks, counts, truths, targets, owners = [], [], [], [], [], []
        for owner, each in ((owner, one) for owner, row in enumerate(asked) for one in row):
            lines = [f": {text}" for text in each.question.options()]
            options.append([rows.setdefault(x, len(rows)) for x in lines] + [0] * (OPTIONS - len(lines)))
            ask = str(each.question.instructions or DEFAULT_INSTRUCTIONS)
            asks.append(rows.setdefault(ask, len(rows)))
            counts.append(len(lines))
            truths.append(each.truth)
            targets.append(self._teacher.answer(packages[owner], each))
            owners.append(owner)
        ids = [self._tokenizing.state_ids(state) for state in states]
        padded, weights = pad(ids, max(map(len, ids)))
        lines_, line_weights = pad([self._line(text) for text in rows], LINE_TOKENS, recent=True)
        sections = [self._teacher.section(package) for package in packages]
        properties = np.stack([self._asker.held(package) for package in packages])
        asked_ = (options, asks, counts, truths, targets, owners)
        arrays = (padded, weights, lines_, line_weights, *asked_, sections, properties)
        return WordBatch(*(torch.as_tensor(np.asarray(array)) for array in arrays))


def _one_of(items: Sequence[str], rng: Rng) -> str:
    return items[int(rng.integers(len(items)))]


def pad(
    rows: Sequence[Sequence[int] | NDArray[np.int64]], width: int, *, recent: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows of ids, and the weights of their mean: equal, or more for the newest."""
    ids = np.zeros((len(rows), width), dtype=np.int64)
    weights = np.zeros((len(rows), width), dtype=np.float32)
    for row, tokens in enumerate(rows):
        count = len(tokens)
        ids[row, :count] = tokens
        share = (1 - RECENT) ** np.arange(count - 1, -1, -1) if recent else np.ones(count)
        weights[row, :count] = share / max(share.sum(), 1e-9)
    return ids, weights
