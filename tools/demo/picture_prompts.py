"""Prompts about pictures, tokenized as they are served: states with room for a picture, and questions about each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from demo.pictures import QUESTIONS, WORDS
from demo.prompts import Batch, Tokenizing
from demo.questions import Rng
from torch import Tensor

from d3serve.model.prompt import build_prompts
from d3serve.schemas.questions import ChoiceQuestion

STATES = (
    "", "", "A drawing", "a picture", "Look at the picture.", "See the attached image", "A sign on a wall.",
    {"picture": "attached"}, {"id": 17, "source": "upload"}, "The customer sent this photo with the order.",
    {"title": "drawing", "author": "unknown", "note": "scanned"},
    "What follows is about the drawing above; answer from what it shows",
)  # fmt: skip
OFFERED = 4  # options of most questions; as many as there are of the others
VARIANTS = 24  # of a question with the same true answer
LONGER = 0.25  # share of questions with all options
HARD = {"colour": 1, "shape": 4, "count": 3, "place": 4}  # how often each is asked
ASKED = 2  # questions about a picture, of different kinds
STEP = 32  # lengths are padded to whole chunks of the gated delta rule


@dataclass(frozen=True)
class Asked:
    """A choice about a picture."""

    name: str  # what is asked
    question: ChoiceQuestion
    truth: int


def ask(name: str, true_word: str, rng: Rng, *, offered: int | None = None) -> Asked:
    """A question whose options hold the true word at a place of chance."""
    others = [word for word in WORDS[name] if word != true_word]
    if offered is None:
        offered = len(WORDS[name]) if rng.random() < LONGER else OFFERED
    words = [true_word, *(others[int(i)] for i in rng.permutation(len(others))[: offered - 1])]
    words = [words[int(i)] for i in rng.permutation(len(words))]
    instructions = QUESTIONS[name][int(rng.integers(len(QUESTIONS[name])))]
    question = ChoiceQuestion(type="choice", instructions=instructions, criteria=dict.fromkeys(words))
    return Asked(name, question, words.index(true_word))


class Prompts:
    """All states with all questions on a device, by number."""

    def __init__(self, tokenizing: Tokenizing, rng: Rng, device: torch.device) -> None:
        """Tokenize them."""
        self.asked = [ask(name, word, rng) for name in WORDS for word in WORDS[name] for _ in range(VARIANTS)]
        named = {str(number): each.question for number, each in enumerate(self.asked)}
        control = tokenizing.tokenizer.control_token
        self._pad = control("<|image_pad|>")
        shown = [control("<|vision_start|>"), self._pad, control("<|vision_end|>")]
        prompts = [
            build_prompts(tokenizing.tokenizer, tokenizing.codes, each, named, shown) for each in STATES
        ]  # type: ignore[arg-type]
        self._states = [prompt.state.tolist() for prompt in prompts]
        blocks = [[block.tolist() for block in prompt.questions] for prompt in prompts]
        length = _up(max(len(block) for row in blocks for block in row))
        padded = [[block + [0] * (length - len(block)) for block in row] for row in blocks]
        self._blocks = torch.tensor(padded, device=device)  # [states, questions, N]
        self._lengths = torch.tensor([[len(block) for block in row] for row in blocks], device=device)
        self._counts = torch.tensor([len(each.question.criteria) for each in self.asked], device=device)
        self.truths = torch.tensor([each.truth for each in self.asked], device=device)
        self._first = {}
        for number, each in enumerate(self.asked):
            word = list(each.question.criteria)[each.truth]
            self._first.setdefault((each.name, word), number)
        self._device = device

    def state(self, number: int) -> object:
        """A state by number, as it is asked about."""
        return STATES[number]

    def numbers(self, truths: Sequence[dict[str, str]], rng: Rng) -> tuple[Tensor, Tensor]:
        """Some questions about each picture, by number [B, ASKED], and which kind each is, by its place in WORDS."""
        kinds, numbers = [], []
        for row in truths:
            shares = np.array([HARD[name] if name in row else 0 for name in WORDS], dtype=np.float64)
            chosen = rng.choice(len(WORDS), ASKED, replace=False, p=shares / shares.sum())
            names = [list(WORDS)[kind] for kind in chosen]
            kinds.append(chosen)
            numbers.append([self._first[name, row[name]] + int(rng.integers(VARIANTS)) for name in names])
        return tuple(torch.as_tensor(np.array(each), device=self._device) for each in (numbers, kinds))  # type: ignore[return-value]

    def batch(self, numbers: Tensor, pads: int, rng: Rng) -> tuple[Batch, Tensor]:
        """Prompts with `pads` tokens of a picture, about a state of chance, and where those are [B, S]."""
        states = rng.integers(len(STATES), size=len(numbers))
        rows = [self._shown(int(state), pads) for state in states]
        width = _up(max(map(len, rows)))
        ids = np.zeros((len(rows), width), dtype=np.int64)
        for row, tokens in enumerate(rows):
            ids[row, width - len(tokens) :] = tokens
        padded = torch.as_tensor(ids, device=self._device)
        chosen = torch.as_tensor(states, device=self._device)[:, None]
        lengths = torch.tensor(list(map(len, rows)), device=self._device)
        made = Batch(
            padded,
            lengths,
            self._blocks[chosen, numbers],
            self._lengths[chosen, numbers],
            self._counts[numbers],
        )
        return made, padded == self._pad

    def _shown(self, state: int, pads: int) -> list[int]:
        ids = self._states[state]
        at = ids.index(self._pad)
        return [*ids[:at], *[self._pad] * pads, *ids[at + 1 :]]


def _up(length: int) -> int:
    return -(-length // STEP) * STEP
