"""Quality of the demo checkpoint through the served path: HTTP, queue, worker.

    python benchmarks/quality.py [--models FOLDER ...] [--dtypes float32 bfloat16] [--quantizations none fp8 fp8-all]
        [--packages N] [--out FILE]

Several models are the same checkpoint in several formats (`tools/quantize_checkpoint.py`); each is compared with the
first, and so is what a worker quantizes itself.

Every held-out question is asked three ways: all questions of a package in one job (its state read once), each
question in a job of its own with all jobs waiting together (the worker groups them by state), and each alone on
an idle service. Accuracy, NLL and ECE come from the first; the others must agree with it.
"""

import argparse
import asyncio
import itertools
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
from heldout import Case, Scored, accuracy, by_family, calibration_error, nll, read_cases, score

from d3serve.settings import Settings
from d3serve.up.local import running

ROOT = Path(__file__).parents[1]
TOGETHER = 128  # jobs that wait at once
ALONE = 150  # questions that are asked alone: the slowest way


def split(cases: Iterable[Case]) -> list[Case]:
    """One case for each question."""
    return [
        Case(case.package, case.state, {name: question}, {name: case.truths[name]})
        for case in cases
        for name, question in case.questions.items()
    ]


async def ask_all(url: str, cases: Sequence[Case], together: int) -> list[Scored]:
    """Post each case as a job, `together` at a time, and score the answers in the order of the cases."""
    gate = asyncio.Semaphore(together)
    async with httpx.AsyncClient(base_url=url, timeout=180) as client:

        async def one(case: Case) -> list[Scored]:
            async with gate:
                body = {"model": "jev-latest", "state": case.state, "questions": case.questions}
                job = (await client.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"})).json()
                if job.get("status") != "succeeded":
                    raise SystemExit(json.dumps(job)[:500])
                return score(case, job["result"]["answers"])

        return list(itertools.chain.from_iterable(await asyncio.gather(*map(one, cases))))


def compare(one: Sequence[Scored], other: Sequence[Scored]) -> dict[str, Any]:
    """How many decisions differ, and the largest difference of a probability."""
    pairs = list(zip(one, other, strict=True))
    moved = max(abs(p - q) for a, b in pairs for p, q in zip(a.probabilities, b.probabilities, strict=True))
    changed = sum(a.decision != b.decision for a, b in pairs)
    return {"questions": len(pairs), "decisions_changed": changed, "largest_difference": moved}


def measure(url: str, cases: Sequence[Case]) -> tuple[dict[str, Any], list[Scored]]:
    """The figures of one running service, and the answers of the first way."""
    once = asyncio.run(ask_all(url, cases, together=8))
    singles = split(cases)
    grouped = asyncio.run(ask_all(url, singles, together=TOGETHER))
    alone = asyncio.run(ask_all(url, singles[:ALONE], together=1))
    table = {
        family: {
            "questions": len(scored),
            "accuracy": accuracy(scored),
            "nll": nll(scored),
            "ece": calibration_error(scored),
        }
        for family, scored in by_family(once).items()
    }
    agreement = {"grouped": compare(once, grouped), "alone": compare(once[:ALONE], alone)}
    return {"quality": table, "agreement_with_one_job_a_state": agreement}, once


def show(kind: str, figures: dict[str, Any]) -> None:
    """Print the figures as tables."""
    print(f"\n{kind}\n| questions | number | accuracy | NLL | ECE |\n| --- | --- | --- | --- | --- |")
    for family, row in figures["quality"].items():
        numbers = f"{row['questions']} | {row['accuracy']:.1%} | {row['nll']:.3f} | {row['ece']:.3f}"
        print(f"| {family} | {numbers} |")
    for way, row in figures["agreement_with_one_job_a_state"].items():
        print(f"{way}: {row}")


def main() -> None:
    """Measure each model and dtype in its own service; print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[str(ROOT / "checkpoints" / "demo-d3")])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--quantizations", nargs="*", default=["none"], choices=["none", "fp8", "fp8-all"])
    parser.add_argument("--packages", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    cases = read_cases(options.packages)
    report: dict[str, Any] = {}
    first: list[Scored] = []
    for model, dtype, quantization in itertools.product(
        options.models, options.dtypes, options.quantizations
    ):
        quantized = {} if quantization == "none" else {"quantization": quantization}
        kind = " ".join((Path(model).name, dtype, *quantized.values()))
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings.load(
                model=model, dtype=dtype, data_dir=Path(folder), port=0, log_level="warning", **quantized
            )
            with running(settings) as (_, url):
                report[kind], once = measure(url, cases)
        show(kind, report[kind])
        first = first or once
        if once is not first:
            against = f"against {next(iter(report))}"
            report[kind][against] = compare(first, once)
            print(f"{against}: {report[kind][against]}")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
