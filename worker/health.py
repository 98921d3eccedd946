"""A probe for the worker of this host: `python -m d3serve.worker.health [--ready]`; exit code 0 means well.

Alive: its main process has shown itself within 30 s (a stuck turn is cut off by the worker itself).
Ready: its model is loaded. A Redis that is away is no reason to restart a worker, so it counts as alive.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # the current folder, which -m puts first: a redis.py there is not meant

import socket

from redis.exceptions import RedisError

from d3serve.errors import StartupError
from d3serve.settings import Settings
from d3serve.store.connect import open_sync
from d3serve.store.keys import Keys
from d3serve.store.records import WorkerInfo


def workers_of(settings: Settings, host: str) -> list[WorkerInfo]:
    """Live workers on a host; raises what Redis raises."""
    keys = Keys(settings.namespace)
    with open_sync(settings, patience_s=0) as client:
        seconds, micros = client.time()
        names = client.zrangebyscore(keys("workers"), seconds * 1000 + micros // 1000, "+inf")
        rows = [(name, client.hgetall(keys("worker", name))) for name in names]
    workers = [WorkerInfo.from_hash(name, row) for name, row in rows if row]
    return [worker for worker in workers if worker.host == host]


def check(settings: Settings, host: str, *, ready: bool) -> tuple[bool, str]:
    """Whether the host's worker is well, and a line that says so."""
    try:
        workers = workers_of(settings, host)
    except RedisError as error:
        return not ready, f"Redis does not answer: {type(error).__name__}"
    if not workers:
        return False, f"no worker on {host} has shown itself in the last 30 s"
    worker = workers[0]
    return (worker.ready or not ready), f"{worker.id}: model {worker.load}"


def main() -> int:
    """Probe as the arguments say; 0 when well."""
    try:
        well, line = check(Settings.load(), socket.gethostname(), ready="--ready" in sys.argv[1:])
    except StartupError as error:
        well, line = False, error.message
    sys.stdout.write(line + "\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
