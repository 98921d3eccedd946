"""Training within a time budget: losses, optimizers, schedule, and a state that a later run continues from."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from demo.batches import Batch
from demo.muon import Muon
from demo.network import Backbone, Output
from demo.questions import OPTIONS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from d3serve.model.config import CODES, Geometry

PART_BYTES = 14_000_000  # of one file of a saved training state
# Weights of the losses beside the answers'.
POINTER, CONSISTENCY, PLACE, SECTION, TAGS = 0.5, 0.5, 0.1, 0.2, 2.0
WARM_UP, DECAY = 0.04, 0.4  # shares of the budget in which the learning rate rises and falls
CLIP = 1.0


class Model(nn.Module):
    """What is trained: the package's tensors, and heads that only training uses."""

    def __init__(self, g: Geometry, sections: int, tags: int) -> None:
        super().__init__()
        self.backbone = Backbone(g)
        self.readout = nn.Parameter(torch.randn(CODES, g.hidden) * g.hidden**-0.5)
        self.option_head = nn.Linear(g.hidden, 1)
        self.place_head = nn.Linear(g.hidden, OPTIONS)
        self.section_head = nn.Linear(g.hidden, sections)
        self.tag_head = nn.Linear(g.hidden, tags)
        for head in (self.option_head, self.place_head, self.section_head, self.tag_head):
            nn.init.normal_(head.weight, std=0.02)

    def forward(self, batch: Batch, *, causal: bool = False) -> Output:
        """Answer a batch."""
        output: Output = self.backbone(batch, self.readout, causal=causal)
        return output


def answer_logits(output: Output, batch: Batch) -> Tensor:
    """Logits of the first OPTIONS codes [B, Q, OPTIONS] in FP32; -inf past a question's last option."""
    return _only(output.logits[..., :OPTIONS].float(), batch.counts)


def _only(scores: Tensor, counts: Tensor) -> Tensor:
    beyond = torch.arange(scores.shape[-1], device=scores.device) >= counts[..., None]
    return scores.masked_fill(beyond, float("-inf"))


def losses(model: Model, batch: Batch, progress: float) -> dict[str, Tensor]:
    """Cross entropy of the answers, and what makes them learnable from little text.

    `pointer` asks each option's own line whether it is the true one, `place` asks it for its code, `section` and
    `tags` ask the state's rows for the index's labels. `consistency` is the symmetric divergence between two
    orders of the same options; it grows with `progress`, since early on it only teaches to shrug.
    """
    output = model(batch)
    logits = answer_logits(output, batch)
    kind = "choice" if batch.orders.shape[1] else "other"
    parts = {kind: F.cross_entropy(logits.flatten(0, 1), batch.truths.flatten())}
    pointer = _only(model.option_head(output.options)[..., 0].float(), batch.counts)
    parts[f"{kind} pointer"] = POINTER * F.cross_entropy(pointer.flatten(0, 1), batch.truths.flatten())
    place = model.place_head(output.options).float()
    places = torch.arange(OPTIONS, device=place.device).expand(place.shape[:-1])
    places = places.masked_fill(places >= batch.counts[..., None], -1)
    parts["place"] = PLACE * F.cross_entropy(place.flatten(0, 2), places.flatten(), ignore_index=-1)
    section = model.section_head(output.state).float()
    if (batch.section >= 0).any():
        parts["section"] = SECTION * F.cross_entropy(section, batch.section, ignore_index=-1)
    known = (batch.tags >= 0).float()
    tags = F.binary_cross_entropy_with_logits(
        model.tag_head(output.state).float(), batch.tags.clamp(min=0), known
    )
    parts["tags"] = TAGS * tags
    if batch.orders.shape[1]:
        parts["consistency"] = CONSISTENCY * progress * _divergence(logits, batch.orders)
    return parts


def _divergence(logits: Tensor, orders: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    one, other = logs[:, 0::2].gather(-1, orders), logs[:, 1::2]
    real = other > float("-inf")
    one, other = one.masked_fill(~real, 0.0), other.masked_fill(~real, 0.0)
    return (((one.exp() - other.exp()) * (one - other)) * real).sum(-1).mean()


@dataclass
class Training:
    """A model with its optimizers: Muon for the layers' matrices, AdamW for everything else."""

    model: Model
    rate: float

    def __post_init__(self) -> None:
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if ".layers." in name and p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in chosen]
        adam = torch.optim.AdamW(others, lr=self.rate, betas=(0.9, 0.98), weight_decay=0.01)
        muon = Muon(matrices, lr=self.rate, weight_decay=0.05)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (muon, adam)

    def run(self, batches: Iterable[Batch], seconds: float, *, report_s: float = 10.0) -> int:
        """Train for `seconds`, printing the mean losses every `report_s`; return the number of steps."""
        device = next(self.model.parameters()).device
        self.model.train()
        start = last = time.monotonic()
        sums: dict[str, list[Tensor]] = {}
        steps = tokens = 0
        for batch in self._until(batches, start + seconds):
            for name, value in self._step(batch.to(device), (time.monotonic() - start) / seconds).items():
                sums.setdefault(name, []).append(value.detach())
            steps, tokens = steps + 1, tokens + batch.tokens
            if (now := time.monotonic()) - last > report_s:
                means = "  ".join(
                    f"{name} {float(torch.stack(v).mean()):.3f}" for name, v in sorted(sums.items())
                )
                print(
                    f"{now - start:6.1f} s  step {steps}  {tokens / (now - start):,.0f} tokens/s  {means}",
                    flush=True,
                )
                sums, last = {}, now
        self.model.eval()
        print(f"{steps} steps, {tokens:,} tokens in {time.monotonic() - start:.1f} s", flush=True)
        return steps

    @staticmethod
    def _until(batches: Iterable[Batch], end: float) -> Iterator[Batch]:
        for batch in batches:
            if time.monotonic() >= end:
                return
            yield batch

    def _step(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * schedule(progress)
        with torch.autocast(batch.states.device.type, dtype=torch.bfloat16, enabled=batch.states.is_cuda):
            parts = losses(self.model, batch, progress)
        torch.stack(tuple(parts.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return parts

    def save(self, folder: Path) -> None:
        """Write weights in FP32 and the optimizers' averages in BF16, in files of limited size."""
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for key, value, _ in self._averages():
            tensors[key] = value.detach().to(torch.bfloat16)
        parts: list[dict[str, Tensor]] = [{}]
        for name, tensor in tensors.items():
            if parts[-1] and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > PART_BYTES:
                parts.append({})
            parts[-1][name] = tensor.cpu().contiguous()
        for index, part in enumerate(parts):
            save_file(part, folder / f"state-{index}.safetensors")

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        tensors = load_state(folder)
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(weights)
        for optimizer in self.optimizers:  # a step without effect makes the averages that are then filled
            for group in optimizer.param_groups:
                group["lr"] = 0.0
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()
        for key, value, step in self._averages():
            if key not in tensors:  # saved before its first step
                continue
            value.copy_(tensors[key])
            if step is not None:
                step.fill_(1000)

    def _averages(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Each running average with its name, and AdamW's step count beside it."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for p, state in optimizer.state.items():
                for kind in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                    if kind in state:
                        yield f"{kind}.{names[id(p)]}", state[kind], state.get("step")


def load_state(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a saved training state."""
    files = sorted(folder.glob("state-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def schedule(progress: float) -> float:
    """The learning rate's share of its peak: a linear rise, a plateau, a cosine fall to zero."""
    if progress < WARM_UP:
        return progress / WARM_UP
    fallen = max(0.0, progress - (1 - DECAY)) / DECAY
    return 0.5 * (1 + math.cos(math.pi * min(1.0, fallen)))
