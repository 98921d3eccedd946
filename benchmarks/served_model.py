"""The whole service over HTTP: broker, API and a worker for each GPU, closed loop with the text mix.

    python tools/make_geometry_package.py FOLDER
    python benchmarks/served_model.py FOLDER --out DIR [--workers 1] [--clients 1 8 64] [--seconds 40]

Each client posts a job, waits for its answers, and posts the next. What the engine alone does on the same mix is
measured afterwards on the first GPU, with turns as large as the worker's. `--workers 1 2` starts the service once with
one GPU and once with two, and says how many times as much the most of them do.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from text_mix import text_mix

from d3serve.settings import Settings
from d3serve.up.local import running

ONE_QUESTION = {"refund": {"type": "noul", "instructions": "Does the customer ask for money back?"}}


def one_state(number: int) -> str:
    """A short state that no other request has."""
    return f"I was charged twice for order {number} and nobody answers. I want the second payment back. " * 6


def all_requests() -> Iterator[dict[str, Any]]:
    """The mix, round after round, with new states each time."""
    for number in itertools.count(1):
        yield from text_mix(number)


async def closed_loop(url: str, clients: int, seconds: float) -> dict[str, Any]:
    """Drive `clients` loops for `seconds` after a short ramp; return rates and latencies."""
    source, latencies, questions = all_requests(), [], 0
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        began = time.perf_counter()
        counted_from = began + min(5.0, seconds / 4)
        until = counted_from + seconds

        async def one_client() -> None:
            nonlocal questions
            while (start := time.perf_counter()) < until:
                body = {"model": "jev-latest", **next(source)}
                response = await client.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"})
                job = response.json()
                if job.get("status") != "succeeded":
                    raise SystemExit(f"{response.status_code}: {json.dumps(job)[:500]}")
                end = time.perf_counter()
                if counted_from <= end <= until:
                    latencies.append((end - start) * 1000)
                    questions += len(body["questions"])

        await asyncio.gather(*(one_client() for _ in range(clients)))
    percentiles = quantiles(latencies, n=100)
    return {
        "clients": clients,
        "seconds": seconds,
        "requests_s": len(latencies) / seconds,
        "questions_s": questions / seconds,
        "p50_ms": percentiles[49],
        "p99_ms": percentiles[98],
    }


def one_by_one(url: str, count: int) -> dict[str, Any]:
    """One client, one question, each time about a new state."""
    times = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for index in range(count):
            body = {"model": "jev-latest", "state": one_state(index), "questions": ONE_QUESTION}
            began = time.perf_counter()
            job = client.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"}).json()
            times.append((time.perf_counter() - began) * 1000)
            if job["status"] != "succeeded":
                raise SystemExit(json.dumps(job)[:500])
    percentiles = quantiles(times[5:], n=100)
    tokens = job["result"]["usage"]["computed_tokens"]
    return {"p50_ms": percentiles[49], "p99_ms": percentiles[98], "tokens": tokens}


class BusyShare:
    """The share of time in which a GPU ran a kernel, on average of those shown; nvidia-smi samples 5 times a second."""

    def __init__(self, gpus: int = 1) -> None:
        """Look at the first of them."""
        self._gpus = gpus

    def __enter__(self) -> "BusyShare":
        """Start sampling."""
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpu = ",".join(shown[: self._gpus] if shown[0] else map(str, range(self._gpus)))
        query = [
            "nvidia-smi",
            "-i",
            gpu,
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "200",
        ]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)  # noqa: S603 - fixed command
        self.percent = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        """Average the samples."""
        self._process.terminate()
        samples = [float(line) for line in self._process.communicate()[0].split() if line.isdigit()]
        self.percent = sum(samples) / max(1, len(samples))


def served(settings: Settings, workers: int, clients: list[int], seconds: float) -> dict[str, Any]:
    """Start the service, time single questions, then drive it with each number of clients."""
    report: dict[str, Any] = {"workers": workers, "loops": []}
    began = time.perf_counter()
    with running(settings) as (_, url):
        report["ready_s"] = time.perf_counter() - began
        report["one_by_one"] = one_by_one(url, 60)
        print(json.dumps(report), flush=True)
        for each in clients:
            with contextlib.ExitStack() as stack:
                busy = stack.enter_context(BusyShare(workers)) if shutil.which("nvidia-smi") else None
                result = asyncio.run(closed_loop(url, each, seconds))
            report["loops"].append({**result, "gpu_busy_percent": busy and busy.percent})
            print(json.dumps(report["loops"][-1]), flush=True)
    return report


def engine_alone(settings: Settings, seconds: float) -> dict[str, Any]:
    """What `decide` alone does with requests tokenized beforehand: in turns of the worker's size, and one by one."""
    from d3serve.schemas import DecisionRequest
    from d3serve.worker.engines import load_engine

    engine: Any = load_engine(settings)
    asked = DecisionRequest(model="x", state=one_state(0), questions=ONE_QUESTION)
    one = engine.prepare(asked.state, asked.questions)
    single = sorted(_decide_s(engine, [one]) for _ in range(30))[15]
    source = (DecisionRequest(model="x", **each) for each in all_requests())
    jobs = (engine.prepare(each.state, each.questions) for each in source)
    mix = list(itertools.islice(jobs, len(list(text_mix(0)))))
    alone_s = min(sum(_decide_s(engine, [job]) for job in mix) for _ in range(3))
    turns = [_turn(jobs, settings.max_batch_tokens) for _ in range(12)]
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(BusyShare()) if shutil.which("nvidia-smi") else None
        done, took = 0, 0.0
        for turn in itertools.cycle(turns):
            if took > seconds:
                break
            took += _decide_s(engine, turn)
            done += sum(job.questions for job in turn)
    return {
        "questions_s": done / took,
        "gpu_busy_percent": busy and busy.percent,
        "one_by_one_questions_s": sum(job.questions for job in mix) / alone_s,
        "one_question_ms": single * 1000,
        "one_question_tokens": one.state_tokens + len(one.blocks[0]),
    }


def _turn(jobs: Iterator[Any], most: int) -> list[Any]:
    """The next jobs, until they hold `most` tokens."""
    turn, tokens = [], 0
    while tokens < most:
        turn.append(next(jobs))
        tokens += turn[-1].state_tokens + sum(map(len, turn[-1].blocks))
    return turn


def _decide_s(engine: Any, jobs: list[Any]) -> float:
    """Seconds of one decision over states that must be read."""
    for job in jobs:
        engine.cache.forget(job.state_key)
    began = time.perf_counter()
    engine.decide(jobs)
    return time.perf_counter() - began


def main() -> None:
    """Run the loops, then the engine alone; print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--workers", type=int, nargs="*", default=[1])
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--data-dir", type=Path, default=Path("/tmp/d3serve-bench"))  # noqa: S108 - a benchmark's own
    options = parser.parse_args()
    report: dict[str, Any] = {"services": []}
    for workers in options.workers:
        settings = Settings.load(
            model=str(options.package),
            load_format="random",
            data_dir=options.data_dir,
            port=0,
            workers=workers,
            log_level="warning",
        )
        report["services"].append(served(settings, workers, options.clients, options.seconds))
    if len(options.workers) > 1:
        few, *_, many = (service["loops"] for service in report["services"])
        report["times_as_much"] = {
            more["clients"]: more["questions_s"] / less["questions_s"]
            for less, more in zip(few, many, strict=True)
        }
        print(json.dumps(report["times_as_much"]), flush=True)
    report["engine_alone"] = engine_alone(settings, options.seconds / 2)
    print(json.dumps(report["engine_alone"]), flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "served_model.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
