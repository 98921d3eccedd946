"""From packages to padded batches of states that fan out to questions, tokenized as they are served.

States are padded on the left, so that their last tokens, which linear layers hand on to questions, line up;
questions are padded on the right, where causal layers and masks never look.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
import torch
from demo.questions import OPTIONS, Asked
from demo.vocabulary import line_ends, load_vocabulary
from numpy.typing import NDArray
from torch import Tensor

from d3serve.model.prompt import build_prompts, state_part

STEP = 32  # lengths are padded to whole chunks of the gated delta rule


@dataclass(frozen=True)
class Sample:
    """One state's tokens, its questions' blocks, and how many options each has."""

    state: NDArray[np.int32]
    blocks: tuple[NDArray[np.int32], ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Tensors of B states with Q questions each."""

    states: Tensor  # [B, S]
    state_lengths: Tensor  # [B]
    questions: Tensor  # [B, Q, N]
    lengths: Tensor  # [B, Q]
    counts: Tensor  # [B, Q]

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        return type(self)(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))


class Tokenizing:
    """Renders and tokenizes with the serving code; shared by training and evaluation."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer, codes, self.vocab_size = load_vocabulary(folder)
        self.codes = [code for code, _ in codes]
        self.token_ids = [index for _, index in codes]
        self.closing = self.tokenizer.encode_tails([""])[0]
        self._is_line_end = np.zeros(self.vocab_size, dtype=bool)
        self._is_line_end[line_ends(folder)] = True

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

    def sample(self, state: object, asked: Sequence[Asked]) -> Sample:
        """Tokenize one state with its questions."""
        questions = {str(index): each.question for index, each in enumerate(asked)}
        prompts = build_prompts(self.tokenizer, self.codes, state, questions)  # type: ignore[arg-type]
        return Sample(prompts.state, prompts.questions, tuple(len(each.question.options()) for each in asked))


def batch(samples: Sequence[Sample]) -> Batch:
    """Pad samples with equally many questions into one batch."""
    size, questions = len(samples), len(samples[0].blocks)
    state_length = _round_up(max(len(s.state) for s in samples))
    length = _round_up(max(len(block) for s in samples for block in s.blocks))
    states = np.zeros((size, state_length), dtype=np.int64)
    blocks = np.zeros((size, questions, length), dtype=np.int64)
    for row, s in enumerate(samples):
        states[row, state_length - len(s.state) :] = s.state
        for column, block in enumerate(s.blocks):
            blocks[row, column, : len(block)] = block
    lengths = [[len(block) for block in s.blocks] for s in samples]
    arrays = (states, [len(s.state) for s in samples], blocks, lengths, [s.counts for s in samples])
    return Batch(*(torch.as_tensor(np.asarray(array)) for array in arrays))


def _round_up(length: int) -> int:
    return -(-length // STEP) * STEP
