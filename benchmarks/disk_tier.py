"""A long state that is asked about again: read by the model, from the device, from a file in memory and from the drive.

    python tools/make_geometry_package.py FOLDER
    python benchmarks/disk_tier.py FOLDER --states FOLDER_ON_THE_DRIVE --out DIR [--tokens 24576 117000] [--device cpu]

Random BF16 weights at the package's geometry. Each row is asked about twice, so that its file is written; then the
device lets the state go, and it is read from its file, once as the page cache has it and once after the cache has let
it go. The answers must have the same bits each time. Called again with the same `--states` the first question of each
row finds the files of the call before: that is a restart.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from d3serve.model.disk_tier import FOLDER
from d3serve.model.engine import DecisionEngine, PreparedJob
from d3serve.schemas.questions import ChoiceQuestion, Question

QUESTIONS: dict[str, Question] = {
    f"q{number}": ChoiceQuestion(
        type="choice", instructions=f"Who handles it ({number})?", criteria={"it": None, "hr": None}
    )
    for number in range(2)
}


def state_of(engine: DecisionEngine, tokens: int) -> PreparedJob:
    """A job whose state has nearly so many tokens."""
    sentences = 30
    while True:
        numbers = range(10_000, 10_000 + sentences)
        text = "".join(f"Order {number} was charged twice and nobody answers. " for number in numbers)
        job = engine.prepare(text, QUESTIONS, max_tokens=engine.info.max_length)
        more = int((tokens - job.state_tokens) / (job.state_tokens / sentences))
        if not more:
            return job
        sentences += more


def ask(engine: DecisionEngine, job: PreparedJob) -> dict[str, Any]:
    """Seconds of one decision, its probabilities, and whether they came from a file."""
    before, began = engine.cache_stats.restored, time.perf_counter()
    (decided,) = engine.decide([job])
    seconds = time.perf_counter() - began
    found = [list(answer.probabilities.values()) for answer in decided.answers.values()]
    return {"seconds": seconds, "from_a_file": engine.cache_stats.restored > before, "probabilities": found}


def wait_until_written(engine: DecisionEngine) -> float:
    """Seconds until nothing is being written."""
    began = time.perf_counter()
    while engine.cache.is_writing:
        time.sleep(0.01)
    return time.perf_counter() - began


def leave_memory(folder: Path) -> int:
    """Have the page cache let the files go; the bytes of all of them."""
    size = 0
    for path in (folder / FOLDER).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size += path.stat().st_size
    return size


def measure(engine: DecisionEngine, tokens: int, folder: Path) -> dict[str, Any]:
    """One row."""
    job = state_of(engine, tokens)
    engine.decide([engine.prepare("warm", QUESTIONS)])
    asked = {"first": ask(engine, job), "on_the_device": ask(engine, job)}
    written_s = wait_until_written(engine)
    engine.cache.clear()
    asked["from_the_page_cache"] = ask(engine, job)
    engine.cache.clear()
    size = leave_memory(folder)
    asked["from_the_drive"] = ask(engine, job)
    engine.cache.clear()
    bits = {json.dumps(each.pop("probabilities")) for each in asked.values()}
    return {
        "state_tokens": job.state_tokens,
        "written_s": written_s,
        "files_bytes": size,
        "equal_bits": len(bits) == 1,
        "probabilities": sorted(bits)[0],
        **asked,
    }


def main() -> None:
    """Measure each row, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--states", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--tokens", type=int, nargs="*", default=[24_576, 117_000])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--load-format", choices=("random", "safetensors"), default="random")
    options = parser.parse_args()
    engine = DecisionEngine.load(
        str(options.package),
        device=options.device,
        load_format=options.load_format,
        state_cache_dir=options.states,
    )
    report = {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "rows": []}
    for tokens in options.tokens:
        report["rows"].append(measure(engine, tokens, options.states))
        print(json.dumps(report["rows"][-1]), flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "disk_tier.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
