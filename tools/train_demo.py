"""Make the bundled demo checkpoint: data, training on one GPU, package.

    python tools/train_demo.py data    --work DIR                      # apt's index, splits, vocabulary
    python tools/train_demo.py train   --work DIR --out RUN [--seconds N] [--resume RUN]
    python tools/train_demo.py package --work DIR --run RUN --out checkpoints/demo-d3 --sample FILE

`train` is the only step that wants a GPU. It stops after `--seconds` of training, measures the held-out
questions and writes what a later run continues from.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase

import numpy as np
import torch
from demo import index, measure
from demo.batches import Batch, Tokenizing, TrainingBatches
from demo.card import model_card
from demo.package import geometry, write_package
from demo.questions import Asker, draw_state
from demo.sample import write_sample
from demo.training import Model, Training, load_state
from demo.vocabulary import train_vocabulary
from torch.utils.data import DataLoader

from d3serve.model.prompt import question_part, state_part
from d3serve.model.tokenizer import SYSTEM

SEED = 20_261_129
VOCABULARY = 5200
VOCABULARY_PACKAGES = 30_000
BATCH_TOKENS = 32_768
RATE = 3e-3
SAMPLE_PACKAGES = 300


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


def train(work: Path, out: Path, seconds: float, resume: Path | None) -> None:
    """Train, measure on validation (which sets the temperature) and test, and save the run."""
    packages = index.load(work / "packages.jsonl.xz")
    known = index.split(packages, "train")
    tokenizing = Tokenizing(work / "vocabulary", known)
    seed = SEED + (0 if resume is None else 1)
    batches = _loader(TrainingBatches(tokenizing, known, BATCH_TOKENS, seed))  # forks before CUDA starts
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    model = Model(geometry(tokenizing.vocab_size), len(tokenizing.sections), len(tokenizing.tags)).to(device)
    training = Training(model, RATE)
    if resume is not None:
        training.load(resume)
    steps = training.run(batches, seconds)
    out.mkdir(parents=True, exist_ok=True)
    training.save(out)
    results = {"steps": steps, "seconds": seconds} | _measure(model, tokenizing, packages)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


def _loader(dataset: TrainingBatches) -> Iterator[Batch]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    workers = max(1, (os.cpu_count() or 2) - 2)
    pinned = torch.cuda.is_available()
    return iter(
        DataLoader(dataset, batch_size=None, num_workers=workers, prefetch_factor=4, pin_memory=pinned)
    )


def _measure(model: Model, tokenizing: Tokenizing, packages: list[index.Package]) -> dict[str, object]:
    """Temperature from the validation split, everything else from the test split."""
    validation, test = (measure.make_exam(packages, split, SEED) for split in ("validation", "test"))
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
    return {"temperature": temperature, **results, "uncalibrated": uncalibrated, "changed_by_order": changed}


def write(work: Path, run: Path, out: Path, sample: Path) -> None:
    """Write the package, its card with the run's results, and the held-out sample."""
    packages = index.load(work / "packages.jsonl.xz")
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    weights = {name.removeprefix("model."): tensor for name, tensor in load_state(run).items()}
    tokenizing = Tokenizing(work / "vocabulary", index.split(packages, "train"))
    test = measure.make_exam(packages, "test", SEED)
    results["baselines"] = measure.baselines(index.split(packages, "train"), test, SEED)
    g = geometry(tokenizing.vocab_size)
    kept = {
        name: tensor for name, tensor in weights.items() if name.startswith("backbone.") or name == "readout"
    }
    card = model_card(results, g, sum(tensor.numel() for tensor in kept.values()))
    write_package(out, work / "vocabulary", kept, g, results["temperature"], card)
    write_sample(test, SAMPLE_PACKAGES, SEED, sample)


def main() -> None:
    """Run the step named on the command line."""
    parser = argparse.ArgumentParser(description="Make the bundled demo checkpoint.")
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("data", "train", "package"):
        steps.add_parser(name).add_argument("--work", type=Path, required=True)
    steps.choices["train"].add_argument("--out", type=Path, required=True)
    steps.choices["train"].add_argument("--seconds", type=float, default=180.0)
    steps.choices["train"].add_argument("--resume", type=Path)
    steps.choices["package"].add_argument("--run", type=Path, required=True)
    steps.choices["package"].add_argument("--out", type=Path, required=True)
    steps.choices["package"].add_argument("--sample", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.step == "data":
        make_data(chosen.work)
    elif chosen.step == "train":
        train(chosen.work, chosen.out, chosen.seconds, chosen.resume)
    else:
        write(chosen.work, chosen.run, chosen.out, chosen.sample)


if __name__ == "__main__":
    main()
