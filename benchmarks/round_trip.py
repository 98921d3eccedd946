"""Where the time of one question goes, from POST to response, stage by stage; two ways of waking the worker in one run.

    python benchmarks/round_trip.py [PACKAGE] [--questions 40] [--pauses 0 0.2] [--out FILE]

PACKAGE is a checkpoint, or a folder of `tools/make_geometry_package.py`, whose weights are drawn at random; without one
a fake engine takes 25 ms for each question. One client asks one question about a new state, reads the answer, pauses,
and asks the next. The stamps are those of Redis' own MONITOR, which shows each command as it begins, and the client's:
nothing in the service is changed. `child` is the service as it is; in `celery` the worker's child takes no wake-up
itself. Times are medians in milliseconds, and so is what each process spent of a processor.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_args

import httpx
import redis

from d3serve.settings import Settings
from d3serve.store import lua
from d3serve.up.broker import running_broker
from d3serve.up.local import start_apis
from d3serve.up.supervisor import ProcessTree, listening

FAKE = "fake:?question_ms=25"
WORKER = Path(__file__).parents[1] / "tests" / "worker_process.py"
WAYS = {"child": {}, "celery": {"d3serve.worker.process:STAY_S": 0}}
QUESTION = {"refund": {"type": "noul", "instructions": "Does the customer ask for money back?"}}
UNCOUNTED = 5  # the first questions of each row: connections are made
STAGES = (
    "sent > submitted",
    "submitted > claimed",
    "claimed > pass marked",
    "host around the pass",
    "the pass",
    "committed > read",
    "read > response",
    "whole",
)
SCRIPTS = {hashlib.sha1(lua.script(name).encode()).hexdigest(): name for name in get_args(lua.ScriptName)}  # noqa: S324 - Redis' own digest
LINE = re.compile(
    r'^(?P<at>\d+\.\d+) \[\d+ (?P<client>[^\]]+)\] "(?P<command>[^"]+)"(?: "(?P<first>[^"]*)")?'
)
PASS_MS = re.compile(
    r'}" "\d+" "([\d.]+)" "'
)  # of a commit, behind its usage and how many questions are done
TICKS_MS = 1000 / os.sysconf("SC_CLK_TCK")


class Seen(NamedTuple):
    """A command that Redis began: when, a script's name or the command's own, and its line."""

    at: float
    name: str
    line: str


class Monitor:
    """Notes every command but those that scripts call."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._connection = self._client.connection_pool.get_connection()
        self._connection.send_command("MONITOR")
        self._connection.read_response()
        self.seen: list[Seen] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                line = self._connection.read_response(timeout=3600)
            except (redis.RedisError, OSError, ValueError):
                return
            text = line.decode("utf-8", "replace")
            found = LINE.match(text)
            if found and found["client"] != "lua":
                name = SCRIPTS.get(found["first"] or "", found["command"].lower())
                self.seen.append(Seen(float(found["at"]), name, text))


def spent_ms() -> dict[str, float]:
    """Processor time so far of each process below this one, by what it is."""
    rows, spent = {}, Counter[str]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
            rows[int(folder.name)] = (
                int(fields[1]),
                (folder / "cmdline").read_text().split("\0"),
                (int(fields[11]) + int(fields[12])) * TICKS_MS,
            )
        except OSError:
            continue
    below = {os.getpid()}
    for pid in sorted(rows):  # a child is younger than its parent
        if rows[pid][0] in below:
            below.add(pid)
    for pid in below - {os.getpid()}:
        parent, command, ms = rows[pid]
        spent[role_of(" ".join(command), " ".join(rows[parent][1]) if parent in rows else "")] += ms
    return dict(spent)


def role_of(command: str, parent: str) -> str:
    """What a process of the service is."""
    if "worker_process" in command and "worker_process" in parent:
        return "worker's child"
    for word, role in (
        ("worker_process", "worker"),
        (" api ", "API"),
        ("valkey", "Redis"),
        ("redis", "Redis"),
    ):
        if word in command:
            return role
    return "worker's child" if "worker_process" in parent else "other"


@contextmanager
def serving(options: argparse.Namespace, way: str) -> Iterator[tuple[str, str]]:
    """Broker, API and a worker; the addresses of the API and of Redis, once the model is loaded."""
    random = options.package and not list(Path(options.package).glob("*.safetensors"))
    loads: dict[str, Any] = {"load_format": "random"} if random else {}
    with tempfile.TemporaryDirectory(prefix="d3serve-round-trip-") as folder:
        settings = Settings.load(
            model=options.package or FAKE, data_dir=folder, port=0, log_level="warning", **loads
        )
        with running_broker(settings) as broker, listening("127.0.0.1", 0, 1) as listeners:
            port = listeners[0].getsockname()[1]
            env = settings.model_copy(update={"redis_url": broker.url, "port": port}).to_env()
            tree, url = ProcessTree(broker.keep), f"http://127.0.0.1:{port}"
            command = [sys.executable, "-P", str(WORKER), json.dumps(WAYS[way]), ""]
            worker = subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.DEVNULL)  # noqa: S603 - our own file
            try:
                start_apis(tree, listeners, env)
                tree.wait_until(lambda: is_ready(url) or worker.poll() is not None, 1800, what="the model")
                yield url, broker.url
            finally:
                worker.terminate()
                tree.stop()
                worker.wait(60)


def is_ready(url: str) -> bool:
    """Whether a model is loaded."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).is_success
    except httpx.TransportError:
        return False


def stages(seen: list[Seen], job: dict[str, Any], sent: float, received: float) -> list[float] | None:
    """The milliseconds of one question by `STAGES`; None where the monitor missed a stamp."""
    last: dict[str, float] = {}
    read = pass_s = 0.0
    for each in seen:
        if each.at < sent:
            continue
        if each.name == "commit" and "commit" not in last:
            last["commit"] = each.at
            found = PASS_MS.search(each.line)
            if found is None:
                raise SystemExit(f"no time of the passes in this commit: {each.line[-300:]}")
            pass_s = float(found[1]) / 1000
        elif "commit" not in last and each.name in ("submit", "claim", "progress"):
            if each.name != "submit" or "submit" not in last:
                last[each.name] = each.at
        elif "commit" in last and not read and each.name in ("hgetall", "get") and job["id"] in each.line:
            read = each.at
    if not read or not {"submit", "claim", "commit"} <= last.keys():
        return None
    begun = last.get("progress", last["claim"])
    parts = (
        last["submit"] - sent,
        last["claim"] - last["submit"],
        begun - last["claim"],
        last["commit"] - begun - pass_s,
        pass_s,
        read - last["commit"],
        received - read,
        received - sent,
    )
    return [1000 * part for part in parts]


def ask(client: httpx.Client, number: int, name: str) -> tuple[dict[str, Any], float, float]:
    """Ask one question about a state that no other request has; the job, when it was sent and answered."""
    state = (
        f"I was charged twice for order {name} {number} and nobody answers. I want the second payment back. "
        * 6
    )
    body = {"model": "jev-latest", "state": state, "questions": QUESTION}
    sent = time.time()
    response = client.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"})
    received, job = time.time(), response.json()
    if job.get("status") != "succeeded":
        raise SystemExit(f"{response.status_code}: {json.dumps(job)[:500]}")
    return job, sent, received


def measure(url: str, monitor: Monitor, count: int, pause_s: float, name: str) -> dict[str, Any]:
    """One client's questions, with a pause before each."""
    rows, commands = list[list[float]](), Counter[str]()
    spent = defaultdict[str, float](float)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for number in range(UNCOUNTED + count):
            if number == UNCOUNTED:
                before = spent_ms()
            time.sleep(pause_s)
            monitor.seen.clear()
            job, sent, received = ask(client, number, name)
            time.sleep(0.02)  # what follows a turn, and the monitor's own lines
            if number >= UNCOUNTED:
                commands.update(each.name for each in monitor.seen if each.at >= sent)
                if parts := stages(list(monitor.seen), job, sent, received):
                    rows.append(parts)
        for role, ms in spent_ms().items():
            spent[role] = (ms - before.get(role, 0.0)) / count
    return {
        "stages_ms": dict(zip(STAGES, map(median, zip(*rows, strict=True)), strict=True)),
        "counted": len(rows),
        "processor_ms": dict(spent),
        "commands": {each: round(times / count, 1) for each, times in commands.most_common()},
    }


def show(found: dict[str, dict[str, Any]]) -> None:
    """Print the tables."""
    print("| | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for stage in STAGES:
        cells = (f"{row['stages_ms'][stage]:.2f}" for row in found.values())
        print(f"| {stage} | " + " | ".join(cells) + " |")
    roles = sorted({role for row in found.values() for role in row["processor_ms"]})
    for role in roles:
        cells = (f"{row['processor_ms'].get(role, 0):.2f}" for row in found.values())
        print(f"| processor: {role} | " + " | ".join(cells) + " |")
    cells = (f"{sum(row['commands'].values()):.1f}" for row in found.values())
    print("| commands to Redis | " + " | ".join(cells) + " |")
    for name, row in found.items():
        print(f"\n{name}: " + ", ".join(f"{each} {times}" for each, times in row["commands"].items()))


def main() -> None:
    """Measure each way of waking with each pause; print and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", nargs="?", default="")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument(
        "--pauses", type=float, nargs="*", default=[0.0, 0.2], help="seconds before a question"
    )
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for way in options.ways:
        with serving(options, way) as (url, redis_url):
            monitor = Monitor(redis_url)
            for pause_s in options.pauses:
                name = f"{way}, pause {pause_s:g} s"
                found[name] = measure(url, monitor, options.questions, pause_s, f"{way} {pause_s}")
    show(found)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
