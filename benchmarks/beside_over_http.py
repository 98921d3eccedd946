"""Short questions over HTTP while one long job runs: broker, API and one worker, as `d3serve up` starts them."""

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx

from d3serve.api_keys import new_key
from d3serve.settings import Settings
from d3serve.up.local import running

SENTENCE = "I was charged twice for order {n} and nobody answers. I want the second payment back. "
SHORT_REPEATS = 6  # about 150 tokens
ASKED = {
    "refund": {"type": "noul", "instructions": "Does the customer ask for money back?"},
    "team": {"type": "choice", "criteria": {"billing": "charges", "shipping": "parcels", "other": None}},
}
ONE = {"refund": ASKED["refund"]}
SHORTS_ALONE_S = 4.0
CANCELED_AT = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25)  # shares of a long pass
PART = re.compile(r"(queue|turn|pass);dur=([0-9.]+)")


class Client:
    """One tenant: what it asks shares no cached state with what others ask."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=300, headers={"Authorization": f"Bearer {key}"})

    async def post(self, state: str) -> str:
        """Post a job with two questions and do not wait; its address."""
        body = {"model": "jev-latest", "state": state, "questions": ASKED}
        response = (await self._http.post("/v1/jobs", json=body)).raise_for_status()
        return response.json()["urls"]["self"]

    async def see(self, job: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The job, as soon as it is so."""
        while not holds(seen := (await self._http.get(job)).raise_for_status().json()):
            if seen["done"]:
                raise SystemExit(f"ended too early: {json.dumps(seen)[:500]}")
            await asyncio.sleep(0.02)
        return seen

    async def cancel(self, job: str) -> None:
        """End it."""
        (await self._http.post(f"{job}/cancel")).raise_for_status()

    async def ask(self, state: str, questions: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """Post a job and wait for its end; the job, and the milliseconds of its queue, its turn and its own pass."""
        body = {"model": "jev-latest", "state": state, "questions": questions}
        response = await self._http.post("/v1/jobs", json=body, headers={"Prefer": "wait=30"})
        while not (job := response.json()).get("done"):
            if not response.is_success:
                raise SystemExit(f"{response.status_code}: {json.dumps(job)[:500]}")
            response = await self._http.get(job["urls"]["self"], params={"wait": 30})
        if job["status"] != "succeeded":
            raise SystemExit(json.dumps(job)[:500])
        told = PART.findall(response.headers.get("Server-Timing", ""))
        if "result" not in job:
            job["result"] = (await self._http.get(job["urls"]["result"])).json()
        return job, {name: float(ms) for name, ms in told}


class Shorts:
    """A short question, about a state of its own, falls due every `every_s`; its time counts from then."""

    def __init__(self, client: Client, every_s: float) -> None:
        self._client, self._every_s, self._number = client, every_s, 0
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self.times_ms: list[float] = []
        self.parts_ms: dict[str, list[float]] = {"queue": [], "turn": [], "pass": [], "rest": []}

    async def until(self, end: "asyncio.Future[Any]") -> None:
        """Ask until then, and wait for the last answers."""
        due, asked = time.perf_counter(), []
        while not end.done():
            asked.append(asyncio.ensure_future(self._one(due)))
            due += self._every_s
            await asyncio.wait([end], timeout=max(0.0, due - time.perf_counter()))
        await asyncio.gather(*asked)

    async def _one(self, due: float) -> None:
        self._number += 1
        _, told = await self._client.ask(SENTENCE.format(n=self._number) * SHORT_REPEATS, ONE)
        self.times_ms.append((time.perf_counter() - due) * 1000)
        told["rest"] = (
            self.times_ms[-1] - told.get("queue", 0) - told.get("turn", 0)
        )  # HTTP, and the way back
        for name, times_ms in self.parts_ms.items():
            times_ms.append(told.get(name, 0.0))

    def told(self) -> dict[str, float]:
        """Percentiles of what was measured: of the whole, and of where its time went."""
        return {
            "jobs": len(self.times_ms),
            **percentiles("", self.times_ms),
            "passes_s": sum(self.parts_ms["pass"]) / 1000,
            **{
                name: ms
                for part, times in self.parts_ms.items()
                for name, ms in percentiles(f"{part}_", times).items()
            },
        }


def percentiles(prefix: str, times_ms: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum, by name."""
    cuts = quantiles(times_ms, n=100) if len(times_ms) > 1 else [float("nan")] * 99
    return {f"{prefix}p50_ms": cuts[49], f"{prefix}p99_ms": cuts[98], f"{prefix}max_ms": max(times_ms)}


async def timed(client: Client, state: str) -> tuple[float, dict[str, Any]]:
    """Seconds until a long job's answers are there, and the job."""
    began = time.perf_counter()
    job, _ = await client.ask(state, ASKED)
    return time.perf_counter() - began, job


async def row(clients: Sequence[Client], shorts: Shorts, state: str) -> dict[str, Any]:
    """One long state, read by three tenants in turn: to warm up, alone, and beside short questions."""
    await timed(clients[0], state)
    alone_s, alone = await timed(clients[1], state)
    shorts.clear()
    long = asyncio.ensure_future(timed(clients[2], state))
    await shorts.until(long)
    beside_s, beside = await long
    told = shorts.told()
    return {
        "state_tokens": alone["result"]["usage"]["state_tokens"],
        "lane": alone["request"]["lane"],
        "alone_s": alone_s,
        "beside_s": beside_s,
        "short": told,
        "price": (beside_s - told["passes_s"]) / alone_s,
        "equal_answers": alone["result"]["answers"] == beside["result"]["answers"],
        "attempts": [alone["attempt"], beside["attempt"]],
    }


async def freed(clients: Sequence[Client], state: str) -> list[float]:
    """Milliseconds from the cancel of a running long job to the start of the next, for some shares of its pass."""
    times_ms = []
    for number, share in enumerate(CANCELED_AT):
        long = await clients[0].post(f"{state} {number}")
        await clients[0].see(long, lambda job, share=share: job["progress"]["fraction"] >= share)
        following = await clients[1].post(f"{state} after {number}")
        asked = time.time()
        await clients[0].cancel(long)
        job = await clients[1].see(following, lambda job: "started_at" in job)
        times_ms.append((job["started_at"] - asked) * 1000)
        await clients[1].cancel(following)
    return times_ms


def write(report: dict[str, Any], out: Path | None) -> None:
    """Write what was measured so far."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "long_beside_short_http.json").write_text(json.dumps(report, indent=1))


async def measure(
    url: str, keys: Sequence[str], tokens: Sequence[int], every_s: float, out: Path | None
) -> None:
    """Short questions alone, then a row for each length; printed and written as they come."""
    clients = [Client(url, key) for key in keys]
    shorts = Shorts(clients[3], every_s)
    await shorts.until(asyncio.ensure_future(asyncio.sleep(SHORTS_ALONE_S)))
    report: dict[str, Any] = {"short_alone": shorts.told(), "rows": []}
    print(json.dumps(report), flush=True)
    probe, _ = await clients[0].ask(SENTENCE.format(n=0) * 100, ONE)
    per_sentence = probe["result"]["usage"]["state_tokens"] / 100
    for count in tokens:
        state = SENTENCE.format(n=0) * round(count / per_sentence)
        report["rows"].append(await row(clients, shorts, state))
        report["rows"][-1]["freed_ms"] = await freed(clients, state)
        print(json.dumps(report["rows"][-1]), flush=True)
        write(report, out)


def over_http(package: str, tokens: Sequence[int], every_s: float, out: Path | None) -> None:
    """Start the service on `package`, with random weights where it has none, and measure."""
    with tempfile.TemporaryDirectory(prefix="d3serve-beside-") as folder:
        made = [new_key(f"tenant-{number}") for number in range(4)]
        key_file = Path(folder) / "keys.jsonl"
        key_file.write_text("".join(line.model_dump_json() + "\n" for _, line in made))
        key_file.chmod(0o600)
        has_weights = package.startswith("fake:") or any(Path(package).glob("*.safetensors"))
        settings = Settings.load(
            model=package, load_format="safetensors" if has_weights else "random", port=0,
            data_dir=Path(folder) / "data", api_keys_file=key_file, log_level="warning",
        )  # fmt: skip
        with running(settings) as (_, url):
            asyncio.run(measure(url, [key for key, _ in made], tokens, every_s, out))
