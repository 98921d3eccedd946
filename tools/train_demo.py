"""Make the bundled demo checkpoint: data, a word model, training end to end, package.

    python tools/train_demo.py data    --work DIR                      # apt's index, splits, vocabulary
    python tools/train_demo.py words   --work DIR --out RUN [--seconds N] [--resume RUN]
    python tools/train_demo.py train   --work DIR --out RUN --resume RUN [--seconds N]
    python tools/train_demo.py package --work DIR --run RUN --out checkpoints/demo-d3 --sample FILE

`words` runs on a CPU and already makes a network that answers; `train` refines it and wants a GPU. Both stop after
`--seconds` of training, measure held-out questions and write what a later run continues from.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase
from typing import TypeVar

import numpy as np
import torch
from demo import index, measure
from demo.batches import Tokenizing, TrainingBatches
from demo.card import model_card
from demo.circuits import install
from demo.package import geometry, write_package
from demo.questions import Asker, draw_state
from demo.sample import write_sample
from demo.training import Model, Training, load_state
from demo.vocabulary import train_vocabulary
from demo.words import WordBatches, WordModel, train_words
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, IterableDataset

from d3serve.model.prompt import question_part, state_part
from d3serve.model.tokenizer import SYSTEM

SEED = 20_261_129
VOCABULARY = 15_000
VOCABULARY_PACKAGES = 60_000
BATCH_TOKENS = 32_768
RATE = 3e-3
WORDS = "words.safetensors"
SAMPLE_PACKAGES = 300
CPU_EXAM = 200  # packages of each split that are measured where there is no GPU

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


def train_from_words(work: Path, out: Path, seconds: float, resume: Path | None) -> None:
    """Fit the word model on a CPU, write it into a network, measure and save it as a run."""
    packages = index.load(work / "packages.jsonl.xz")
    known = index.split(packages, "train")
    tokenizing = Tokenizing(work / "vocabulary", known)
    torch.manual_seed(SEED)
    words = WordModel(tokenizing)
    if resume is not None:
        words.load_state_dict(load_file(resume / WORDS))
    seed = SEED + (resume is not None)
    train_words(words, _loader(WordBatches(tokenizing, known, seed), workers=1), seconds)
    out.mkdir(parents=True, exist_ok=True)
    save_file(words.state_dict(), out / WORDS)
    model = _model(tokenizing)
    install(model, words, tokenizing)
    _finish(Training(model, RATE), tokenizing, packages, out)


def train(work: Path, out: Path, seconds: float, resume: Path) -> None:
    """Train end to end from an earlier run, measure and save."""
    packages = index.load(work / "packages.jsonl.xz")
    known = index.split(packages, "train")
    tokenizing = Tokenizing(work / "vocabulary", known)
    workers = max(1, (os.cpu_count() or 2) - 2)
    dataset = TrainingBatches(tokenizing, known, BATCH_TOKENS, SEED)
    batches = _loader(dataset, workers)  # forks before CUDA starts
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    training = Training(_model(tokenizing).to("cuda" if torch.cuda.is_available() else "cpu"), RATE)
    training.load(resume)
    training.run(batches, seconds)
    _finish(training, tokenizing, packages, out)


def _model(tokenizing: Tokenizing) -> Model:
    return Model(geometry(tokenizing.vocab_size), len(tokenizing.sections), len(tokenizing.tags))


def _finish(training: Training, tokenizing: Tokenizing, packages: list[index.Package], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    training.save(out)
    results = _measure(training.model.eval(), tokenizing, packages)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


def _loader(dataset: IterableDataset[T], workers: int) -> Iterator[T]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pinned = torch.cuda.is_available()
    return iter(
        DataLoader(dataset, batch_size=None, num_workers=workers, prefetch_factor=4, pin_memory=pinned)
    )


def _measure(model: Model, tokenizing: Tokenizing, packages: list[index.Package]) -> dict[str, object]:
    """Temperature from the validation split, everything else from the test split."""
    size = None if torch.cuda.is_available() else CPU_EXAM
    validation, test = (measure.make_exam(packages, split, SEED, size) for split in ("validation", "test"))
    truths = np.array([asked.truth for asked in measure.flat(validation)])
    temperature = measure.calibrate(measure.answer(model, tokenizing, validation), truths)
    asked = measure.flat(test)
    exams = {
        "held_out": measure.answer(model, tokenizing, test),
        "causal_mask": measure.answer(model, tokenizing, test, causal=True),
    }
    results = {
        name: measure.report(measure.probabilities(out, temperature), asked) for name, out in exams.items()
    }
    uncalibrated = measure.report(measure.probabilities(exams["held_out"], 1.0), asked)["all"]
    turned = measure.answer(model, tokenizing, measure.reversed_choices(test))
    changed = measure.changed_by_order(exams["held_out"], turned, asked)
    return {
        "packages": size,
        "temperature": temperature,
        **results,
        "uncalibrated": uncalibrated,
        "changed_by_order": changed,
    }


def write(work: Path, run: Path, out: Path, sample: Path) -> None:
    """Write the package, its card with the run's results, and the held-out sample."""
    packages = index.load(work / "packages.jsonl.xz")
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    weights = {name.removeprefix("model."): tensor for name, tensor in load_state(run).items()}
    tokenizing = Tokenizing(work / "vocabulary", index.split(packages, "train"))
    test = measure.make_exam(packages, "test", SEED, results["packages"])
    results["baselines"] = measure.baselines(index.split(packages, "train"), test, SEED)
    g = geometry(tokenizing.vocab_size)
    kept = {
        name: tensor for name, tensor in weights.items() if name.startswith("backbone.") or name == "readout"
    }
    card = model_card(results, g, sum(tensor.numel() for tensor in kept.values()))
    write_package(out, work / "vocabulary", kept, g, results["temperature"], card)
    write_sample(measure.make_exam(packages, "test", SEED), SAMPLE_PACKAGES, SEED, sample)


def main() -> None:
    """Run the step named on the command line."""
    parser = argparse.ArgumentParser(description="Make the bundled demo checkpoint.")
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("data", "words", "train", "package"):
        steps.add_parser(name).add_argument("--work", type=Path, required=True)
    for name in ("words", "train", "package"):
        steps.choices[name].add_argument("--out", type=Path, required=True)
    for name in ("words", "train"):
        steps.choices[name].add_argument("--seconds", type=float, default=900.0)
    steps.choices["words"].add_argument("--resume", type=Path)
    steps.choices["train"].add_argument("--resume", type=Path, required=True)
    steps.choices["package"].add_argument("--run", type=Path, required=True)
    steps.choices["package"].add_argument("--sample", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.step == "data":
        make_data(chosen.work)
    elif chosen.step == "words":
        train_from_words(chosen.work, chosen.out, chosen.seconds, chosen.resume)
    elif chosen.step == "train":
        train(chosen.work, chosen.out, chosen.seconds, chosen.resume)
    else:
        write(chosen.work, chosen.run, chosen.out, chosen.sample)


if __name__ == "__main__":
    main()
