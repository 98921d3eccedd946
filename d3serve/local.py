"""One machine, one process tree: the broker (unless there is a URL), the API, one worker, the webhook sender."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

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
            descriptor = listener.fileno()
            tree.start("api", ["api", "--fd", str(descriptor)], env, pass_fds=(descriptor,))
            tree.start("worker", ["worker"], env)
            tree.start("webhooks", ["webhooks"], env)
            tree.wait_until(lambda: _is_ready(url), READY_TIMEOUT_S, what="the model")
            yield tree, url


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=PROBE_TIMEOUT_S).is_success
    except httpx.TransportError:
        return False
