"""Fits the word model within a time budget, and continues where an earlier run stopped."""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from demo.batches import WordBatch
from demo.questions import OPTIONS
from demo.words import WordModel
from torch import Tensor

FORGOTTEN = 0.3  # share of a state's tokens that a step leaves out
DROPOUT = 0.1  # of what a state is read as
RATE, WEIGHT_DECAY = 5e-3, 0.1
RARE = 1e-4  # a gradient below which a word moves less than in step: a rare word learns little from little
NEIGHBOURS = 0.2  # share of the rate with which the layer of neighbours learns
LABELS = 1.0  # weight of the loss on all labels
POINTER = 0.3  # weight of the loss on the evidence before it selects
FALL = 0.7  # share of the time in which the rate falls to zero
REPORT_STEPS = 200
STATE = "training.pt"


class Training:
    """A word model with its optimizer."""

    def __init__(self, model: WordModel) -> None:
        self.model, self.steps = model, 0
        near, words = list(model.neighbours.parameters()), (model.vectors, model.weights)
        chosen = {id(p) for p in (*near, *words)}
        groups = [
            {"params": [p for p in model.parameters() if id(p) not in chosen], "rate": RATE},
            {"params": near, "rate": RATE * NEIGHBOURS},
            {"params": [model.vectors], "rate": RATE, "eps": RARE},
            {"params": [model.weights], "rate": RATE, "eps": RARE, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)

    def run(self, batches: Iterable[WordBatch], seconds: float) -> None:
        """Train for `seconds`; the rate stays, then falls to zero."""
        device, shown = self.model.vectors.device, []
        start = time.monotonic()
        for batch in batches:
            left = 1 - (time.monotonic() - start) / seconds
            if left <= 0:
                break
            shown.append(self.step(batch.to(device), min(1.0, left / FALL)))
            if self.steps % REPORT_STEPS == 0:
                loss, every, twelve, two = torch.stack(shown).mean(0).tolist()
                right = f"right {every:.3f}  of twelve {twelve:.3f}  of two {two:.3f}"
                print(
                    f"{time.monotonic() - start:6.1f} s  step {self.steps}  loss {loss:.3f}  {right}",
                    flush=True,
                )
                shown = []

    def step(self, batch: WordBatch, share: float) -> Tensor:
        """One step at a share of the rates: loss and accuracy of all answers, of twelve options, of two."""
        read = F.dropout(self.model.read(forgetful(batch)), DROPOUT)
        matched, yes = self.model.compare(batch, read)
        final = self.model.logits(matched, yes)
        answer, pointer = (soft_cross_entropy(logits, batch.targets) for logits in (final, matched))
        (answer + POINTER * pointer + LABELS * label_loss(self.model, batch, read)).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * share
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.neighbours.confine()
        self.steps += 1
        right = (final.argmax(-1) == batch.truths).float()
        picked = (right, right[batch.counts == OPTIONS], right[batch.counts == 2])
        return torch.stack((answer.detach(), *(each.mean() for each in picked)))

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to continue exactly."""
        folder.mkdir(parents=True, exist_ok=True)
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }
        torch.save(saved, folder / STATE)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        saved = torch.load(folder / STATE, map_location=self.model.vectors.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.steps = saved["steps"]


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the rows of -sum(target · log p), [..., K] both; a logit of -inf needs a target of zero."""
    logs = logits.log_softmax(-1).masked_fill(logits == float("-inf"), 0.0)
    return -(targets * logs).sum(-1).mean()


def forgetful(batch: WordBatch) -> WordBatch:
    """The batch with a share of each state's tokens left out, so that no word is relied on alone."""
    kept = batch.state_weights * (torch.rand_like(batch.state_weights) >= FORGOTTEN)
    return replace(batch, state_weights=kept / kept.sum(-1, keepdim=True).clamp(min=1e-6))


def label_loss(model: WordModel, batch: WordBatch, read: Tensor) -> Tensor:
    """All sections and properties at once: what the questions ask one at a time."""
    section = soft_cross_entropy(model.section_head(read), batch.sections)
    known = (batch.properties >= 0).float()
    truths = batch.properties.clamp(min=0)
    held = F.binary_cross_entropy_with_logits(model.property_head(read), truths, known, reduction="sum")
    return section + 10.0 * held / known.sum()
