"""One machine, one process tree: the broker (unless there is a URL), the API, workers, the webhook sender, the
feeder of batches.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import socket

import httpx

from d3serve.api_keys import make_key_ring
from d3serve.logs import configure_logging
from d3serve.settings import METRICS_FOLDER, Settings
from d3serve.up.broker import running_broker
from d3serve.up.crew import Place, places
from d3serve.up.supervisor import LEAVE_S, ProcessTree, listening

READY_TIMEOUT_S = 1_800.0  # a 52 GB checkpoint from a cold disk takes minutes
PROBE_TIMEOUT_S = 2.0


@contextmanager
def running(settings: Settings) -> Iterator[tuple[ProcessTree, str]]:
    """The tree and the API's address, once every worker has loaded the model; everything ends with the block.

    Raises:
        StartupError: a setting or the API keys are refused, the port is taken, a process ended, or nothing came up
            within half an hour.
    """
    configure_logging(settings, process="up")
    make_key_ring(settings)  # what the API would refuse, before a worker loads a model
    crew = places(settings)
    with listening(settings.host, settings.port, settings.api_processes) as listeners, \
            running_broker(settings) as broker:  # fmt: skip
        tree = ProcessTree(broker.keep, stop_timeout_s=settings.stop_grace_s + LEAVE_S)
        host, port = listeners[0].getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        found = {"redis_url": broker.url, "port": port, "state_dir": shared_state_dir(settings)}
        env = settings.model_copy(update=found).to_env()
        # No proxy of the environment's: this server is on this host.
        probe = httpx.Client(timeout=PROBE_TIMEOUT_S, trust_env=False)
        with probe, counting_together(len(listeners)) as shared, tree.stopped_by_signals():
            start_workers(tree, crew, env)  # first: they take longest
            start_apis(tree, listeners, env | shared)
            tree.wait_until(lambda: _are_ready(len(crew), probe, url), READY_TIMEOUT_S, what="the model")
            tree.start("webhooks", ["webhooks"], env)  # last: they would take a processor from the two above
            tree.start("batches", ["batches"], env)
            yield tree, url


def shared_state_dir(settings: Settings) -> Path | None:
    """The folder asked for, else one beside a broker of our own: nobody on another host has its jobs."""
    if settings.state_dir is None and settings.redis_url is None:
        return settings.data_folder().resolve() / "states"
    return settings.state_dir


@contextmanager
def counting_together(processes: int) -> Iterator[dict[str, str]]:
    """What API processes need in their environment to count HTTP requests in one place, kept within the block."""
    if processes == 1:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="d3serve-metrics-") as folder:
        yield {METRICS_FOLDER: folder}


def start_workers(tree: ProcessTree, crew: Sequence[Place], env: dict[str, str]) -> None:
    """Start a worker in each of the places."""
    for number, place in enumerate(crew, start=1):
        tree.start("worker" if len(crew) == 1 else f"worker {number}", ["worker"], env | place.env)


def start_apis(tree: ProcessTree, listeners: Sequence[socket], env: dict[str, str]) -> None:
    """Start an API process on each of the listening sockets."""
    for number, listener in enumerate(listeners, start=1):
        descriptor = listener.fileno()
        tree.start(f"api {number}", ["api", "--fd", str(descriptor)], env, pass_fds=(descriptor,))


def run_apis(settings: Settings) -> None:
    """Run `settings.api_processes` API processes until a signal stops them.

    Raises:
        StartupError: the port is taken, or one of them ended.
    """
    tree = ProcessTree()
    with listening(settings.host, settings.port, settings.api_processes) as listeners, \
            counting_together(len(listeners)) as shared, tree.stopped_by_signals():  # fmt: skip
        start_apis(tree, listeners, settings.to_env() | shared)
        tree.run()


def _are_ready(workers: int, probe: httpx.Client, url: str) -> bool:
    """Whether so many have loaded the model; on a broker that others use too, theirs are counted with ours."""
    try:
        answer = probe.get(f"{url}/readyz")
    except httpx.TransportError:
        return False
    return answer.is_success and answer.json()["workers"] >= workers
