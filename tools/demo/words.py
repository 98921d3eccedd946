"""A model of the questions that is small enough to train in minutes, and is then written into the network's weights.

A layer reads a state's words beside those before them; the state is their weighted mean, and the mean of what each
means beside it. A line of a question is the mean of its words, recent ones weighing more. Bilinear units compare the
two. `circuits` makes the network of it: its norms, its attention and its gates are part of the model here.
"""

import torch
import torch.nn.functional as F
from demo import labels
from demo.batches import LINE_TOKENS, WordBatch, pad
from demo.delta_rule import CHUNK
from demo.network import Layer
from demo.package import geometry
from demo.prompts import Tokenizing
from demo.questions import OPTIONS
from torch import Tensor, nn

from d3serve.model.config import Geometry
from d3serve.model.prompt import REQUEST

WIDTH, UNITS = 64, 384
ALWAYS, LARGE = 216, 16.0  # a residual dimension, large in all rows, that keeps the norms nearly constant
SMALL = 0.25  # of what the network stores of a meaning, for the same reason
WEIGHED = 6.0  # logit of the weightiest word's share of a state
SHARPNESS, GAIN = 0.6, 9.0  # of the attention that selects an option, and of the readout behind it
SILENT = 7  # line ends of a yes/no prompt that are averaged: the question's own and six constant ones


class WordModel(nn.Module):
    """Token vectors, and units that compare a line with a state."""

    def __init__(self, tokenizing: Tokenizing) -> None:
        super().__init__()
        self.section_head = nn.Linear(2 * WIDTH, len(labels.SECTIONS))
        self.property_head = nn.Linear(2 * WIDTH, len(labels.properties()))
        self.vectors = nn.Parameter(torch.randn(tokenizing.vocab_size, WIDTH) * 0.1)
        self.weights = nn.Parameter(torch.zeros(tokenizing.vocab_size, 1))
        self.neighbours = Neighbours(geometry(tokenizing.vocab_size))
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
        constant, weights = pad([row[-LINE_TOKENS:] for row in spoken], LINE_TOKENS, recent=True)
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
        vectors = self.neighbours(
            F.embedding(batch.states, self.vectors * self.mute), batch.state_weights > 0
        )
        told = F.embedding(batch.states, self.weights)
        shares = batch.state_weights * (WEIGHED * told * torch.rsqrt(1 + told.square()))[..., 0].exp()
        shares = shares / shares.sum(-1, keepdim=True)
        states = 4 * torch.einsum("bs,bsw->bw", shares, vectors * _shrunk(vectors, told))
        inside = F.embedding(batch.states, self.inside)[..., 0]
        return torch.cat((states, self._features(vectors, told, states, shares * inside)), dim=-1)

    def compare(self, batch: WordBatch, read: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, from what `read` gave."""
        vectors = self.vectors * self.mute
        lines = _mean(vectors, batch.lines, batch.line_weights)
        words, meaning = read.split(WIDTH, dim=-1)
        stored = torch.cat((words, meaning * SMALL), dim=-1)[batch.owners]
        shrunk = _shrunk(lines[batch.options], stored[:, None])
        lines, units = self.line(lines), self.state(read)
        seen = F.silu(lines[batch.options] * shrunk) * shrunk
        matched = torch.einsum("nku,nu->nk", seen, units[batch.owners] * self.option)
        constant = F.silu(self.line(_mean(vectors, self.constant, self.constant_weights))).sum(0)
        constant = constant + 2 * F.silu(self.line.bias)
        yes = torch.einsum("nu,nu->n", (F.silu(lines[batch.asks]) + constant) * self.ask, units[batch.owners])
        beyond = torch.arange(OPTIONS, device=matched.device) >= batch.counts[:, None]
        return matched.masked_fill(beyond, float("-inf")), yes

    def _features(self, vectors: Tensor, told: Tensor, states: Tensor, shares: Tensor) -> Tensor:
        """The mean over a state's tokens of what each means in this state [B, WIDTH]."""
        own, shared = self.context.weight.split(WIDTH, dim=-1)
        shared = F.linear(states, shared, self.context.bias)[:, None]
        shrunk = _shrunk(vectors, told, states[:, None])
        meaning = self.feature(F.silu((vectors @ own.T + shared) * shrunk) * shrunk)
        meaning = meaning * _shrunk(vectors, told, states[:, None], meaning * SMALL)
        return 4 * torch.einsum("bs,bsw->bw", shares, meaning)

    @staticmethod
    def logits(matched: Tensor, yes: Tensor) -> Tensor:
        """What the readout will say: the selecting attention's share of each option, and yes against no."""
        selected = GAIN * (SHARPNESS * matched).softmax(-1)
        shift = torch.zeros_like(selected)
        shift[:, 0], shift[:, 1] = -yes / 2, yes / 2
        return (selected + shift).masked_fill(matched == float("-inf"), float("-inf"))


def _mean(vectors: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return F.embedding_bag(ids, vectors, per_sample_weights=weights, mode="sum")


def _shrunk(*parts: Tensor) -> Tensor:
    """What a row's norm leaves of it beside LARGE, [..., 1]: one for short vectors."""
    squares = [part.square().sum(-1, keepdim=True) for part in parts]
    return torch.rsqrt(1 + sum(squares[1:], squares[0]) / LARGE**2)


class Neighbours(nn.Module):
    """A layer of the network that reads words beside those before them: it sees and writes their vectors alone."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.layer = Layer(g, 0)
        for name, p in self.layer.named_parameters():
            self.register_buffer(name.replace(".", "-"), _allowed(name, p), persistent=False)
            if name.endswith(("out_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)
        self.confine()

    @torch.no_grad()
    def confine(self) -> None:
        """Undo what a step did to weights that read or write anything else."""
        for name, p in self.layer.named_parameters():
            p.mul_(self.get_buffer(name.replace(".", "-")))

    def forward(self, vectors: Tensor, kept: Tensor) -> Tensor:
        """Vectors of states' words [B, S, WIDTH] to the same beside their neighbours; `kept` [B, S] is no padding."""
        missing = -vectors.shape[1] % CHUNK
        x = F.pad(vectors, (0, self.layer.linear_attn.g.hidden - WIDTH, 0, missing))
        kept = F.pad(kept, (0, missing))
        x[..., ALWAYS] = LARGE
        mixer, normed = self.layer.linear_attn, self.layer.input_layernorm(x)
        mixed = mixer.in_proj_qkv(normed) * kept[..., None]
        read, _ = mixer.mix(normed, F.pad(mixed, (0, 0, mixer.g.conv_width - 1, 0)), kept, None)
        x = x + read
        x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        return x[:, : vectors.shape[1], :WIDTH]


def _allowed(name: str, p: Tensor) -> Tensor:
    mask = torch.ones_like(p)
    if name.endswith("layernorm.weight"):
        return torch.zeros_like(p)
    if name.endswith(("out_proj.weight", "down_proj.weight")):
        mask[WIDTH:] = 0.0
    elif p.ndim == 2:
        mask[:, WIDTH:] = 0.0
        mask[:, ALWAYS] = 1.0
    return mask
