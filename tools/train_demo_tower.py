"""Give the bundled demo checkpoint a vision tower: training.

    python tools/train_demo_tower.py --package checkpoints/demo-d3 --out RUN [--seconds 220]

It wants a GPU and some processors, which draw. It learns from drawings that follow from a seed: nothing is fetched, and
none is seen twice. What the checkpoint answers about texts does not change by a bit.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo.looking import Tower, read_network
from demo.network import Shown
from demo.picture_prompts import Prompts
from demo.pictures import WORDS, draw
from demo.prompts import Tokenizing
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SEED = 20_261_130
WORKERS = 15  # processes that draw, where there are as many cores
PIXELS = 144 * 256 * 256  # of a step
SIZES = ((256, 256), (256, 256), (256, 256), (256, 288), (256, 320), (352, 352), (384, 512), (512, 512))
RATE, WEIGHT_DECAY, WARM = 1.2e-3, 0.02, 200
FALL = 0.6  # share of the time in which the rate falls to zero
REPORT_STEPS = 100
CHECKED = 6  # steps of new drawings, of each kind


@dataclass(frozen=True)
class Seen:
    """Pictures of one size [B, 3, height, width], and what is true of each."""

    pictures: NDArray[np.uint8]
    truths: list[dict[str, str]]


class Drawings(IterableDataset[Seen]):
    """Endless steps of new drawings."""

    def __init__(self, seed: int, pixels: int, *, held_out: bool = False) -> None:
        """Draw `pixels` a step, of the pairs that are held out or of the others."""
        self._seed, self._pixels, self._held_out = seed, pixels, held_out

    def __iter__(self) -> Iterator[Seen]:
        info = get_worker_info()
        rng = np.random.default_rng([self._seed, info.id if info else 0])
        while True:
            width, height = SIZES[int(rng.integers(len(SIZES)))]
            if rng.random() < 0.5:
                width, height = height, width
            count = max(1, self._pixels // (width * height))
            drawn = [draw(rng, width, height, held_out=self._held_out) for _ in range(count)]
            pictures = np.stack([each.pixels.transpose(2, 0, 1) for each in drawn])
            yield Seen(pictures, [each.truths for each in drawn])


class Training:
    """A tower with its optimizer, before a checkpoint that stays as it is."""

    def __init__(self, package: Path, device: torch.device) -> None:
        """Read the checkpoint and draw a tower."""
        tokenizing = Tokenizing(package)
        decision = json.loads((package / "decision_config.json").read_text(encoding="utf-8"))
        self._temperature: float = decision["temperature"]
        self._network = read_network(package, tokenizing.vocab_size).to(device)
        self._rng = np.random.default_rng(SEED)
        self._prompts = Prompts(tokenizing, self._rng, device)
        self.tower, self.steps = Tower(device), 0
        self.optimizer = torch.optim.AdamW(
            self.tower.parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY
        )

    def run(self, batches: Iterator[Seen], seconds: float) -> None:
        """Train for `seconds`; the rate rises, stays, then falls to zero."""
        shown: list[dict[str, float]] = []
        start = time.monotonic()
        for seen in batches:
            left = 1 - (time.monotonic() - start) / seconds
            if left <= 0:
                break
            shown.append(self.step(seen, min(1.0, left / FALL, (self.steps + 1) / WARM)))
            if self.steps % REPORT_STEPS == 0:
                told = "  ".join(
                    f"{name} {np.nanmean([each[name] for each in shown]):.3f}" for name in shown[0]
                )
                print(f"{time.monotonic() - start:6.1f} s  step {self.steps}  {told}", flush=True)
                shown = []

    def step(self, seen: Seen, share: float) -> dict[str, float]:
        """One step at a share of the rate: the loss, and the share of right answers by what was asked."""
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * share
        loss, right = self.ask(seen)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.tower.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tower.confine()
        self.steps += 1
        return dict(zip(("loss", *WORDS), torch.cat((loss[None], right)).tolist(), strict=True))

    @torch.no_grad()
    def check(self, batches: Iterator[Seen], count: int) -> str:
        """The same of drawings that nothing was learnt from."""
        loss, right = zip(*(self.ask(seen) for seen in islice(batches, count)), strict=True)
        shares = dict(zip(WORDS, torch.stack(right).nanmean(0).tolist(), strict=True))
        told = "  ".join(f"{name} {share:.3f}" for name, share in shares.items())
        return f"loss {float(torch.stack(loss).mean()):.3f}  {told}"

    def ask(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """The mean loss of questions about each picture; the share of right answers by kind [kinds]."""
        numbers, kinds = self._prompts.numbers(seen.truths, self._rng)
        logits, truths = self._logits(seen, numbers), self._prompts.truths[numbers]
        right = logits.argmax(-1) == truths
        shares = [right[kinds == kind].float().mean() for kind in range(len(WORDS))]
        return F.cross_entropy(logits.flatten(0, 1), truths.flatten()), torch.stack(shares)

    def _logits(self, seen: Seen, numbers: Tensor) -> Tensor:
        """What the checkpoint answers to questions by number [B, ASKED]: [B, ASKED, OPTIONS]."""
        features = self.tower.features(seen.pictures)
        batch, pads = self._prompts.batch(numbers, features.shape[1], self._rng)
        logits: Tensor = self._network(batch, shown=Shown(pads, features)) / self._temperature
        return logits


def train(package: Path, out: Path, seconds: float, resume: Path | None) -> None:
    """Train a tower and write its tensors."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes that draw are forks
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = Training(package, device)
    if resume is not None:
        training.tower.load(load_file(resume / "tower.safetensors"))
    pixels = PIXELS if device.type == "cuda" else 4 * 256 * 256
    workers = max(1, min(WORKERS, (os.cpu_count() or 2) - 1))
    seed = SEED + (resume is not None)
    pinned = device.type == "cuda"  # whose thread takes what the processes drew
    loader = DataLoader(
        Drawings(seed, pixels), batch_size=None, num_workers=workers, prefetch_factor=3, pin_memory=pinned
    )
    training.run(iter(loader), seconds)
    out.mkdir(parents=True, exist_ok=True)
    save_file(training.tower.save(), out / "tower.safetensors", metadata={"format": "pt"})
    print(f"{training.steps} steps; wrote {out / 'tower.safetensors'}", flush=True)
    for held_out in (False, True):
        told = training.check(iter(Drawings(SEED - 1, pixels, held_out=held_out)), CHECKED)
        print(f"new drawings, {'pairs held out' if held_out else 'pairs learnt from'}: {told}", flush=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description="Give the bundled demo checkpoint a vision tower.")
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=220.0)
    parser.add_argument("--resume", type=Path, default=None, help="the folder of a run to continue from")
    options = parser.parse_args()
    train(options.package, options.out, options.seconds, options.resume)


if __name__ == "__main__":
    main()
