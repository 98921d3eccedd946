"""Is the engine right at this geometry? Asked before anything is timed; a wrong engine has no speed."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from peers import Peer, qwen
from torch import Tensor

torch.backends.cudnn.allow_tf32 = False  # what is called FP32 here is FP32; matrix products are by default
NOISE = (
    1e-4  # FP32 against FP32 differs by less than this; only BF16 needs the peer's own error as a yardstick
)
MARGIN = 0.02  # decisions must agree wherever the reference prefers one option by more than this
OPTIONS = 8


@dataclass(frozen=True)
class Parity:
    """Differences of probabilities [N, OPTIONS] from an FP32 reference, and decisions that changed."""

    ours: Tensor
    peer: Tensor
    changed: int

    @property
    def bound(self) -> float:
        """What a single difference may be: twice transformers' own largest."""
        return max(2 * float(self.peer.abs().max()), NOISE)

    @property
    def holds(self) -> bool:
        """Whether our error is at most twice transformers', in the mean square, and no clear decision changed."""
        return rms(self.ours) <= max(2 * rms(self.peer), NOISE) and self.changed == 0

    def __str__(self) -> str:
        """Both errors, as root mean squares and at their largest."""
        ours, peer = (
            f"{rms(each):.5f} ± {standard_error(each):.5f} (largest {float(each.abs().max()):.5f})"
            for each in (self.ours, self.peer)
        )
        return (
            f"rms of dp against FP32: ours {ours}, transformers BF16 {peer}; "
            f"decisions changed {self.changed} of {len(self.ours)}"
        )


def compare(peer: Peer, state: Tensor, questions: Sequence[Tensor], ours: Tensor) -> Parity:
    """Our probabilities [N, OPTIONS] and transformers' BF16 ones, both against FP32 layer by layer."""
    reference = probabilities(reference_logits(peer, state, questions))
    theirs = probabilities(peer.whole_prompts(state, questions))
    return Parity(ours - reference, theirs - reference, changed_decisions(ours, reference))


def rms(difference: Tensor) -> float:
    """Root of the mean square."""
    return float(difference.square().mean().sqrt())


def standard_error(difference: Tensor) -> float:
    """The standard error of the rms over questions, by the spread of their mean squares."""
    squares = difference.square().mean(dim=1)
    root = float(squares.mean().sqrt())
    return float(squares.std()) / len(squares) ** 0.5 / (2 * root) if root else 0.0


def probabilities(logits: Tensor) -> Tensor:
    """Softmax over the first options, FP32 on the host."""
    return logits[:, :OPTIONS].float().softmax(-1).cpu()


def changed_decisions(ours: Tensor, reference: Tensor) -> int:
    """How many rows prefer another option although the reference's margin exceeds 0.02."""
    return int(((ours.argmax(-1) != reference.argmax(-1)) & (margins(reference) > MARGIN)).sum())


def errors(found: Tensor, reference: Tensor) -> dict[str, Any]:
    """The rms of dp with its standard error over questions, the largest, and decisions changed where it matters."""
    difference = (found - reference).double()
    other = found.argmax(-1) != reference.argmax(-1)
    crossed = sorted((round(each, 4) for each in margins(reference)[other].tolist()), reverse=True)
    return {
        "rms": round(rms(difference), 6),
        "+-": round(standard_error(difference), 6),
        "largest": round(float(difference.abs().max()), 5),
        "changed beyond the margin": changed_decisions(found, reference),
        "changed": int(other.sum()),
        "their margins": [each for each in crossed if each > MARGIN],
        "questions": len(found),
    }


def margins(reference: Tensor) -> Tensor:
    """By how much each row prefers its best option to the next."""
    best = reference.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


@torch.inference_mode()
def reference_logits(peer: Peer, state: Tensor, questions: Sequence[Tensor]) -> Tensor:
    """Transformers' layers in FP32, one layer's weights widened at a time: 27B in FP32 would not fit.

    The gated delta rule is its own in PyTorch: fla's multiplies FP32 operands as TF32.
    """
    peer.state_tokens = len(state)
    rule = "torch_chunk_gated_delta_rule"
    with patch.object(qwen, rule, inspect.unwrap(getattr(qwen, rule))):
        return _wide_logits(peer, state, questions)


def _wide_logits(peer: Peer, state: Tensor, questions: Sequence[Tensor]) -> Tensor:
    model = peer.model
    rows = []
    for question in questions:
        tokens = torch.cat((state, question))[None]
        hidden = model.embed_tokens(tokens).float()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, 1, -1)
        rotary = model.rotary_emb(hidden, positions)
        for layer in model.layers:
            wide = {name: value.float() for name, value in layer.named_parameters()}
            hidden = torch.func.functional_call(
                layer, wide, (hidden,), {"position_embeddings": rotary, "attention_mask": None}
            )
        rows.append(model.norm(hidden)[:, -1])
    return torch.cat(rows) @ peer.readout.T
