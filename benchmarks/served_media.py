"""Photos and videos over HTTP: broker, API and one worker with its decoding process, one client.

    python tools/make_geometry_package.py FOLDER
    python benchmarks/served_media.py FOLDER --out DIR [--engine DIR/media.json] [--rounds 15]

Each round shows files that the service has not seen, but for the row that asks about the same photo again. Engine
times of `media.py` on the same machine, beside which a request may take 40 ms for each photo that the host decodes,
are subtracted where that file is given.
"""

import argparse
import base64
import json
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
from decoding import clip, photo, saved

from d3serve.settings import Settings
from d3serve.up.local import running

STATE = "The pictures are of one delivery. " * 15  # some 150 tokens
INSTRUCTIONS = "Does the delivery look as it should, by the rules for what a driver has to show? " * 2


class Shown(NamedTuple):
    """A row, by its name in `media.py`."""

    name: str
    photos: int
    videos: int
    questions: int
    again: bool = False  # the same files in every round, with other questions


ROWS = (
    Shown("one photo, 1 question", 1, 0, 1),
    Shown("one photo, 8 questions", 1, 0, 8),
    Shown("three photos, 6 questions", 3, 0, 6),
    Shown("11 s of 720p, 6 questions", 0, 1, 6),
    Shown("one photo cached, 8 questions", 1, 0, 8, again=True),
)


def as_url(kind: str, data: bytes) -> str:
    """A file as the service takes it."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def photos(side: int) -> Iterator[str]:
    """Photos, each another."""
    for seed in count():
        yield as_url("image/jpeg", saved(photo(side, side, seed), "JPEG", quality=90))


def clips(seconds: int) -> Iterator[str]:
    """Videos, each another: a file is known by its bytes, so what follows the last box makes another of it."""
    file = clip(1280, 720, seconds)
    for number in count():
        free = (8 + 4).to_bytes(4) + b"free" + number.to_bytes(4)
        yield as_url("video/mp4", file + free)


def requests(row: Shown, photos: Iterator[str], clips: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Jobs of a row: new files each time, unless it asks again, and always other questions."""
    images, videos = list(islice(photos, row.photos)), list(islice(clips, row.videos))
    for number in count():
        asked = {"type": "choice", "criteria": dict.fromkeys(map(str, range(8)))}
        questions = {
            f"q{index}": {**asked, "instructions": f"{INSTRUCTIONS} {number} {index}"}
            for index in range(row.questions)
        }
        files = {name: urls for name, urls in (("images", images), ("videos", videos)) if urls}
        yield {"model": "jev-latest", "state": STATE, "questions": questions, **files}
        if not row.again:
            images, videos = list(islice(photos, row.photos)), list(islice(clips, row.videos))


def row_ms(client: httpx.Client, bodies: Iterator[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Times of one row's requests, the first of which is not counted, and what the last of them used."""
    times: list[float] = []
    usage: dict[str, Any] = {}
    for body in islice(bodies, rounds + 1):
        content = json.dumps(body).encode()  # made beforehand: a client's own work is no part of it
        began = time.perf_counter()
        response = client.post("/v1/jobs", content=content)
        times.append((time.perf_counter() - began) * 1000)
        job = response.json()
        if job.get("status") != "succeeded":
            raise SystemExit(f"{response.status_code}: {json.dumps(job)[:500]}")
        usage = job["result"]["usage"]
    return {
        "p50_ms": median(times[1:]),
        "least_ms": min(times[1:]),
        "most_ms": max(times[1:]),
        "usage": usage,
    }


def measure(url: str, rounds: int, side: int, seconds: int) -> Iterator[dict[str, Any]]:
    """Each row's result, as it is found."""
    images, videos = photos(side), clips(seconds)
    headers = {"Prefer": "wait=60", "Content-Type": "application/json"}
    with httpx.Client(base_url=url, timeout=300, headers=headers, trust_env=False) as client:
        for row in ROWS:
            yield {"row": row.name, **row_ms(client, requests(row, images, videos), rounds)}


def main() -> None:
    """Ask, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--engine", type=Path, default=None, help="media.json of media.py, of this machine")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--side", type=int, default=1280, help="pixels of a photo's sides")
    parser.add_argument("--seconds", type=int, default=11, help="of a video")
    parser.add_argument("--data-dir", type=Path, default=Path("/tmp/d3serve-bench"))  # noqa: S108 - a benchmark's own
    options = parser.parse_args()
    engine = json.loads(options.engine.read_text())["rows"] if options.engine else []
    engine_ms = {row["row"]: row["ours_ms"] for row in engine}
    settings = Settings.load(
        model=str(options.package), load_format="random", data_dir=options.data_dir, port=0, log_level="warning"
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    began = time.perf_counter()
    with running(settings) as (_, url):
        print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
        for result in measure(url, options.rounds, options.side, options.seconds):
            if (own := engine_ms.get(result["row"])) is not None:
                result["beside_engine_ms"] = result["p50_ms"] - own
            results.append(result)
            print(json.dumps(result), flush=True)
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / "served_media.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
