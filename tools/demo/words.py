"""A bag-of-words model of the questions: what the network knows before it is trained end to end.

A state is the mean of its tokens' vectors, a line of a question their mean with recent tokens weighing more, and a
bilinear unit compares the two. It trains on a CPU at a million tokens a second, and `circuits` writes it into the
network's weights: attention that averages a state, a gated delta rule that averages a line.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from demo import labels
from demo.batches import CHOICES, SCORES, Tokenizing
from demo.index import Package
from demo.questions import OPTIONS, Asked, Asker, Rng, draw_state
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from d3serve.model.prompt import DEFAULT_INSTRUCTIONS, REQUEST, option_texts

WIDTH, UNITS = 64, 384
LINE_TOKENS = 16  # of a line that are averaged
RECENT = 0.2  # how much of a line's mean its newest token makes
SHARPNESS, GAIN = 0.6, 9.0  # of the attention that selects an option, and of the readout behind it
STATES = 192  # of one step
NOTHING = 0.015  # share of states of which nothing is known: the answer is then how often each one is true
FORGOTTEN = 0.15  # share of a state's tokens that a step leaves out
SILENT = (
    7  # line ends of a yes/no prompt whose comparisons are averaged: the question's own and six constant ones
)


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
    owners: Tensor  # [N] rows of `states`
    sections: Tensor  # [B], -1 where unnamed
    properties: Tensor  # [B, properties] 1 true, 0 false, -1 unknown


class WordBatches(IterableDataset[WordBatch]):
    """Endless steps of STATES packages, six questions each."""

    def __init__(self, tokenizing: Tokenizing, packages: Sequence[Package], seed: int) -> None:
        self._tokenizing, self._packages, self._seed = tokenizing, packages, seed
        self._asker = Asker(packages)
        self._known_lines: dict[str, NDArray[np.int64]] = {}

    def __iter__(self) -> Iterator[WordBatch]:
        rng = np.random.default_rng(self._seed)
        while True:
            order = rng.permutation(len(self._packages))
            for start in range(0, len(order) - STATES, STATES):
                yield self._batch([self._packages[int(i)] for i in order[start : start + STATES]], rng)

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
        options, asks, counts, truths, owners = [], [], [], [], []
        for owner, each in ((owner, one) for owner, row in enumerate(asked) for one in row):
            lines = [f": {text}" for text in option_texts(each.question)]
            options.append([rows.setdefault(x, len(rows)) for x in lines] + [0] * (OPTIONS - len(lines)))
            ask = str(each.question.instructions or DEFAULT_INSTRUCTIONS)
            asks.append(rows.setdefault(ask, len(rows)))
            counts.append(len(lines))
            truths.append(each.truth)
            owners.append(owner)
        ids = [self._tokenizing.state_ids(state) for state in states]
        padded, weights = _pad(ids, max(map(len, ids)))
        lines_, line_weights = _pad([self._line(text) for text in rows], LINE_TOKENS, recent=True)
        sections = [self._tokenizing.sections.get(package.section, -1) for package in packages]
        properties = np.stack([self._asker.held(package) for package in packages])
        known = (sections, properties)
        arrays = (padded, weights, lines_, line_weights, options, asks, counts, truths, owners, *known)
        return WordBatch(*(torch.as_tensor(np.asarray(array)) for array in arrays))


def _one_of(items: Sequence[str], rng: Rng) -> str:
    return items[int(rng.integers(len(items)))]


def _pad(
    rows: Sequence[Sequence[int] | NDArray[np.int64]], width: int, *, recent: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows of ids with the weights of their mean."""
    ids = np.zeros((len(rows), width), dtype=np.int64)
    weights = np.zeros((len(rows), width), dtype=np.float32)
    for row, tokens in enumerate(rows):
        count = len(tokens)
        ids[row, :count] = tokens
        share = (1 - RECENT) ** np.arange(count - 1, -1, -1) if recent else np.ones(count)
        weights[row, :count] = share / max(share.sum(), 1e-9)
    return ids, weights


class WordModel(nn.Module):
    """Token vectors, and units that compare a line with a state."""

    def __init__(self, tokenizing: Tokenizing) -> None:
        super().__init__()
        self.section_head = nn.Linear(2 * WIDTH, len(tokenizing.sections))
        self.property_head = nn.Linear(2 * WIDTH, len(labels.properties()))
        self.vectors = nn.Parameter(torch.randn(tokenizing.vocab_size, WIDTH) * 0.3)
        self.context = nn.Linear(2 * WIDTH, UNITS)
        self.feature = nn.Linear(UNITS, WIDTH, bias=False)
        self.line = nn.Linear(WIDTH, UNITS)
        self.state = nn.Linear(2 * WIDTH, UNITS)
        self.option = nn.Parameter(torch.randn(UNITS) * UNITS**-0.5)
        self.ask = nn.Parameter(torch.randn(UNITS) * UNITS**-0.5)
        nn.init.normal_(self.line.weight, std=0.3)
        nn.init.normal_(self.state.weight, std=0.2)
        nn.init.normal_(self.context.weight, std=0.2)
        nn.init.normal_(self.feature.weight, std=0.05)
        closing = tokenizing.closing
        request = tokenizing.text_ids(REQUEST.removeprefix("Reply"))
        ends = [i for i, token in enumerate(closing) if tokenizing.ends_line(token)]
        if len(ends) + 3 != SILENT:
            raise ValueError("the prompt's constant line ends are not those that the circuits average")
        spoken = [[*request, *(t for t in closing[:end] if not tokenizing.ends_line(t))] for end in ends]
        constant, weights = _pad([row[-LINE_TOKENS:] for row in spoken], LINE_TOKENS, recent=True)
        self.register_buffer("constant", torch.as_tensor(constant), persistent=False)
        self.register_buffer("constant_weights", torch.as_tensor(weights), persistent=False)
        self.register_buffer("mute", torch.ones(tokenizing.vocab_size, 1), persistent=False)
        self.mute[tokenizing.mute_tokens()] = 0.0
        self.register_buffer("inside", torch.ones(tokenizing.vocab_size, 1), persistent=False)
        self.inside[[token for token in range(len(self.inside)) if tokenizing.ends_line(token)]] = 0.0

    def forward(self, batch: WordBatch) -> tuple[Tensor, Tensor]:
        """Evidence for each option [N, OPTIONS], -inf past the last, and what the question itself adds to yes [N]."""
        return self.compare(batch, self.read(batch))

    def read(self, batch: WordBatch) -> Tensor:
        """What a state is about: its words' mean and their mean meaning, [B, 2·WIDTH]."""
        vectors = self.vectors * self.mute
        states = 4 * _mean(vectors, batch.states, batch.state_weights)
        return torch.cat((states, self._features(vectors, batch, states)), dim=-1)

    def compare(self, batch: WordBatch, read: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, from what `read` gave."""
        vectors = self.vectors * self.mute
        lines = F.silu(self.line(_mean(vectors, batch.lines, batch.line_weights)))
        units = self.state(read)
        matched = torch.einsum("nku,nu->nk", lines[batch.options] * self.option, units[batch.owners])
        constant = F.silu(self.line(_mean(vectors, self.constant, self.constant_weights))).sum(0)
        constant = constant + 2 * F.silu(self.line.bias)
        yes = torch.einsum("nu,nu->n", (lines[batch.asks] + constant) * self.ask, units[batch.owners])
        beyond = torch.arange(OPTIONS) >= batch.counts[:, None]
        return matched.masked_fill(beyond, float("-inf")), yes

    def _features(self, vectors: Tensor, batch: WordBatch, states: Tensor) -> Tensor:
        """The mean over a state's tokens of what each means in this state [B, WIDTH]."""
        owners, columns = batch.state_weights.nonzero(as_tuple=True)
        tokens, weights = batch.states[owners, columns], batch.state_weights[owners, columns]
        own, shared = self.context.weight.split(WIDTH, dim=-1)
        seen = F.embedding(tokens, vectors) @ own.T + F.linear(states, shared, self.context.bias)[owners]
        seen = F.silu(seen) * (F.embedding(tokens, self.inside) * weights[:, None])
        pooled = torch.zeros(len(states), UNITS).index_add(0, owners, seen)
        return 4 * self.feature(pooled)

    @staticmethod
    def logits(matched: Tensor, yes: Tensor) -> Tensor:
        """What the readout will say: the selecting attention's share of each option, and yes against no."""
        selected = GAIN * (SHARPNESS * matched).softmax(-1)
        shift = torch.zeros_like(selected)
        shift[:, 0], shift[:, 1] = -yes / 2, yes / 2
        return (selected + shift).masked_fill(matched == float("-inf"), float("-inf"))


def _mean(vectors: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return F.embedding_bag(ids, vectors, per_sample_weights=weights, mode="sum")


def train_words(model: WordModel, batches: Iterator[WordBatch], seconds: float, rate: float = 5e-3) -> None:
    """Fit by AdamW for `seconds`, with a rate that falls to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    shown: list[Tensor] = []
    start = time.monotonic()
    for step, batch in enumerate(batches, 1):
        left = 1 - (time.monotonic() - start) / seconds
        if left <= 0:
            break
        read = model.read(_forgetful(batch))
        matched, yes = model.compare(batch, read)
        final = model.logits(matched, yes)
        answer = F.cross_entropy(final, batch.truths)
        loss = answer + 0.3 * F.cross_entropy(matched, batch.truths) + 0.5 * _label_loss(model, batch, read)
        optimizer.param_groups[0]["lr"] = rate * min(1.0, left / 0.7)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (final.argmax(-1) == batch.truths).float()
        picked = (right, right[batch.counts == OPTIONS], right[batch.counts == 2])
        shown.append(torch.stack((answer.detach(), *(each.mean() for each in picked))))
        if step % 50 == 0:
            loss_, every, twelve, two = torch.stack(shown).mean(0).tolist()
            print(
                f"step {step}  loss {loss_:.3f}  right {every:.3f}  of twelve {twelve:.3f}  of two {two:.3f}",
                flush=True,
            )
            shown = []


def _forgetful(batch: WordBatch) -> WordBatch:
    """The batch with a share of each state's tokens left out, so that no word is relied on alone."""
    kept = batch.state_weights * (torch.rand_like(batch.state_weights) >= FORGOTTEN)
    return replace(batch, state_weights=kept / kept.sum(-1, keepdim=True).clamp(min=1e-6))


def _label_loss(model: WordModel, batch: WordBatch, read: Tensor) -> Tensor:
    """All sections and properties at once: what the questions ask one at a time."""
    section = F.cross_entropy(model.section_head(read), batch.sections, ignore_index=-1)
    known = (batch.properties >= 0).float()
    truths = batch.properties.clamp(min=0)
    held = F.binary_cross_entropy_with_logits(model.property_head(read), truths, known, reduction="sum")
    return section + 10.0 * held / known.sum()
