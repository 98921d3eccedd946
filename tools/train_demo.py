"""Make the bundled demo checkpoint: data, training, package.

    python tools/train_demo.py data    --work DIR                      # apt's index, splits, vocabulary
    python tools/train_demo.py teach   --work DIR                      # soft labels for the training split
    python tools/train_demo.py train   --work DIR --out RUN [--seconds N] [--resume RUN]
    python tools/train_demo.py package --work DIR --run RUN --out checkpoints/demo-d3 --sample FILE

`train` wants a GPU. It stops after `--seconds` of training, writes the network, measures held-out questions and keeps
what a later run continues from.
"""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Self, TypeVar

import numpy as np
import torch
from demo import index, measure, teacher
from demo.batches import WordBatches
from demo.card import model_card
from demo.circuits import install
from demo.network import Model
from demo.package import geometry, load_weights, save_weights, write_package
from demo.prompts import Tokenizing
from demo.questions import Asker, draw_state
from demo.sample import write_sample
from demo.training import Training
from demo.vocabulary import train_vocabulary
from demo.words import WordModel
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from d3serve.model.prompt import question_part, state_part
from d3serve.model.tokenizer import SYSTEM

SEED = 20_261_129
VOCABULARY = 15_000
VOCABULARY_PACKAGES = 60_000
SAMPLE_PACKAGES = 300
WORKERS = 14  # processes that make batches, where there are as many cores
EXAM_ROWS = 64  # packages that are measured together

T = TypeVar("T")


def make_data(work: Path) -> None:
    """Fetch and parse the index, then train the vocabulary on the training split."""
    lists = work / "lists"
    index.download(lists)
    packages = index.read_index(lists)
    index.save(packages, work / "packages.jsonl.xz")
    train_vocabulary(_vocabulary_texts(index.split(packages, "train")), VOCABULARY, work / "vocabulary")


def _vocabulary_texts(packages: list[index.Package]) -> Iterator[str]:
    """States and some of their questions, as prompts show them."""
    asker, rng = Asker(packages), np.random.default_rng(SEED)
    for number in rng.permutation(len(packages))[:VOCABULARY_PACKAGES]:
        package = packages[int(number)]
        yield state_part(draw_state(package, rng))
        for family in ("section", "noul", "name", "summary", "size"):
            asked = asker.ask(package, family, rng)
            if asked and rng.random() < 0.3:
                yield f"system\n{SYSTEM}\nuser\n{question_part('q', asked.question, ascii_uppercase)}\nassistant\n"


@dataclass(frozen=True)
class Work:
    """What training and measuring read."""

    folder: Path
    packages: list[index.Package]
    tokenizing: Tokenizing

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read what `data` wrote."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes that make batches are forks
        return cls(folder, index.load(folder / "packages.jsonl.xz"), Tokenizing(folder / "vocabulary"))

    def batches(self, seed: int) -> WordBatches:
        """Batches of the training split, taught by what `teach` wrote."""
        known = index.split(self.packages, "train")
        taught = teacher.load(self.folder / "teacher.npz", known)
        return WordBatches(self.tokenizing, Asker(known), taught, known, seed)


def teach(work: Path) -> None:
    """Soften the training split's labels."""
    known = index.split(index.load(work / "packages.jsonl.xz"), "train")
    teacher.save(teacher.teach(known, SEED + 1), work / "teacher.npz")


def train(work: Work, out: Path, seconds: float, resume: Path | None) -> None:
    """Fit the word model, write it into a network, save both and measure the network."""
    torch.manual_seed(SEED)
    training = Training(WordModel(work.tokenizing).to(_device()))
    if resume is not None:
        training.load(resume)
    batches = _loader(work.batches(SEED + training.steps))
    torch.set_float32_matmul_precision("high")
    training.run(batches, seconds)
    training.save(out)
    model = Model(geometry(work.tokenizing.vocab_size))
    install(model, training.model.cpu(), work.tokenizing)
    save_weights(model, out)
    model.load_state_dict(load_weights(out))  # as the package stores them
    torch.set_float32_matmul_precision("highest")
    results = measure_all(model.to(_device()).eval(), work)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _loader(dataset: IterableDataset[T]) -> Iterator[T]:
    workers = max(1, min(WORKERS, (os.cpu_count() or 2) - 2))
    pinned = torch.cuda.is_available()
    return iter(
        DataLoader(dataset, batch_size=None, num_workers=workers, prefetch_factor=4, pin_memory=pinned)
    )


def measure_all(model: Model, work: Work) -> dict[str, object]:
    """Temperature from the validation split, everything else from the test split."""
    validation, exam = (measure.make_exam(work.packages, split, SEED) for split in ("validation", "test"))

    def answer(exam: measure.Exam, *, causal: bool = False) -> NDArray[np.float32]:
        samples = measure.tokenized(work.tokenizing, exam)
        return measure.answer(model, samples, causal=causal, rows=EXAM_ROWS)

    sure, held_out = answer(validation), answer(exam)
    truths = np.array([asked.truth for asked in measure.flat(validation)])
    temperature = measure.calibrate(sure, truths)

    def report(
        logits: NDArray[np.float32], exam: measure.Exam, temperature: float
    ) -> dict[str, dict[str, float]]:
        return measure.report(measure.probabilities(logits, temperature), measure.flat(exam))

    return {
        "packages": len(exam.packages),
        "temperature": temperature,
        "validation": report(sure, validation, temperature),
        "held_out": report(held_out, exam, temperature),
        "causal_mask": report(answer(exam, causal=True), exam, temperature),
        "uncalibrated": report(held_out, exam, 1.0)["all"],
        "changed_by_order": measure.changed_by_order(
            held_out, answer(measure.reversed_choices(exam)), measure.flat(exam)
        ),
    }


def write(work: Work, run: Path, out: Path, sample: Path) -> None:
    """Write the package, its card with the run's results, and the held-out sample."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    weights = load_weights(run)
    exam = measure.make_exam(work.packages, "test", SEED)
    baselines = measure.baselines(index.split(work.packages, "train"), exam, SEED)
    results["baselines"] = {name: float(right.mean()) for name, right in baselines.items()}
    g = geometry(work.tokenizing.vocab_size)
    card = model_card(results, g, sum(tensor.numel() for tensor in weights.values()))
    write_package(out, work.folder / "vocabulary", weights, g, results["temperature"], card)
    write_sample(exam, baselines, SAMPLE_PACKAGES, SEED, sample)


def main() -> None:
    """Run the step named on the command line."""
    parser = argparse.ArgumentParser(description="Make the bundled demo checkpoint.")
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("data", "teach", "train", "package"):
        steps.add_parser(name).add_argument("--work", type=Path, required=True)
    for name in ("train", "package"):
        steps.choices[name].add_argument("--out", type=Path, required=True)
    steps.choices["train"].add_argument("--seconds", type=float, default=900.0)
    steps.choices["train"].add_argument("--resume", type=Path)
    steps.choices["package"].add_argument("--run", type=Path, required=True)
    steps.choices["package"].add_argument("--sample", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.step == "data":
        make_data(chosen.work)
    elif chosen.step == "teach":
        teach(chosen.work)
    elif chosen.step == "train":
        train(Work.open(chosen.work), chosen.out, chosen.seconds, chosen.resume)
    else:
        write(Work.open(chosen.work), chosen.run, chosen.out, chosen.sample)


if __name__ == "__main__":
    main()
