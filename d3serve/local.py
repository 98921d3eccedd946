"""One machine, one process tree: the broker (unless there is a URL), the API, one worker, the webhook sender."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from socket import socket

import httpx

from d3serve.broker import running_broker
from d3serve.settings import Settings
from d3serve.supervisor import ProcessTree, bind

READY_TIMEOUT_S = 1_800.0  # a 52 GB checkpoint from a cold disk takes minutes
PROBE_TIMEOUT_S = 2.0


@contextmanager
def running(settings: Settings) -> Iterator[tuple[ProcessTree, str]]:
    """The tree and the API's address, once a worker has loaded the model; everything ends with the block.

    Raises:
        StartupError: the port is taken, a process ended, or nothing came up within half an hour.
    """
    tree = ProcessTree()
    with closing(bind(settings.host, settings.port)) as listener, running_broker(settings) as redis_url:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        env = settings.model_copy(update={"redis_url": redis_url, "port": port}).to_env()
        with tree.stopped_by_signals():
            start_apis(tree, listener, env, settings.api_processes)
            tree.start("worker", ["worker"], env)
            tree.start("webhooks", ["webhooks"], env)
            tree.wait_until(lambda: _is_ready(url), READY_TIMEOUT_S, what="the model")
            yield tree, url


def start_apis(tree: ProcessTree, listener: socket, env: dict[str, str], processes: int) -> None:
    """Start that many API processes on one listening socket; the kernel spreads connections over them."""
    descriptor = listener.fileno()
    for number in range(processes):
        tree.start(f"api {number + 1}", ["api", "--fd", str(descriptor)], env, pass_fds=(descriptor,))


def run_apis(settings: Settings) -> int:
    """Run `settings.api_processes` API processes until one ends or a signal stops them; the exit code.

    Raises:
        StartupError: the port is taken.
    """
    tree = ProcessTree()
    with closing(bind(settings.host, settings.port)) as listener, tree.stopped_by_signals():
        start_apis(tree, listener, settings.to_env(), settings.api_processes)
        return tree.run()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=PROBE_TIMEOUT_S).is_success
    except httpx.TransportError:
        return False
