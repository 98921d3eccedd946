"""One tenant posts very many jobs at once; how long does another tenant's single job wait?

    python benchmarks/flood.py [--jobs 20000] [--states 2000] [--out FILE]

Two workers with a fake engine of known speed. Tenant A's jobs are all in the queue before the clock starts; then
tenant B submits a job a second, each with a state of its own, until A's are done. The longest batch stands beside the
waits: a turn is one batch or a few.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from service import QUESTIONS, Ours, Place, timed

from d3serve.schemas import DecisionRequest
from d3serve.settings import Settings
from d3serve.store.jobs import JobStore
from d3serve.up.broker import EmbeddedBroker

STATE_MS, QUESTION_MS = 20, 2
WORKERS = 2


async def submit(store: JobStore, tenant: str, state: str) -> str:
    """Submit one job; workers that are busy find it without a wake-up."""
    request = DecisionRequest(model="fake", state=state, questions=dict(QUESTIONS))
    return (await store.submit(request, tenant=tenant)).job_id


async def flood(settings: Settings, jobs: int, states: int) -> None:
    """Tenant A's jobs, state by state in turn."""
    async with JobStore.open(settings) as store:
        await timed(jobs, 16, lambda i: _flooded(store, i % states))


async def others(settings: Settings) -> dict[str, float]:
    """Ask for tenant B as long as anything of A's waits."""
    waits: list[float] = []
    async with JobStore.open(settings) as store:
        began = time.perf_counter()
        while (await store.stats()).lanes["interactive"].queued_jobs > 0:
            due = began + len(waits) + 1
            asked = time.perf_counter()
            job_id = await submit(store, "B", f"b {len(waits)}")
            job = await store.wait(job_id, "B", 300)
            if job.status != "succeeded":
                raise SystemExit(f"a job ended as {job.status}")
            waits.append(time.perf_counter() - asked)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        drained_s = time.perf_counter() - began
    return {
        "drained_s": drained_s,
        "other_jobs": len(waits),
        "wait_p50_s": median(waits),
        "wait_max_s": max(waits),
    }


async def _flooded(store: JobStore, state: int) -> None:
    await submit(store, "A", f"a {state}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--states", type=int, default=2_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker", 2**30).start()
        try:
            place = Place(broker.url, Path(folder) / "trace")
            settings = Settings(redis_url=broker.url, log_level="error")
            engine = place.engine(state_ms=STATE_MS, question_ms=QUESTION_MS, cache=10_000)
            asyncio.run(flood(settings, options.jobs, options.states))
            with Ours(place).workers(WORKERS, engine):
                result = asyncio.run(others(settings))
            passes = [json.loads(line) for line in place.trace.read_text().splitlines()]
            result["longest_batch_s"] = max(each["ended"] - each["began"] for each in passes)
        finally:
            broker.stop()
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
