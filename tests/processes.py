"""What tests ask of processes that they start and kill."""

import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may go between the opening and the reading
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def ends(pid: int, timeout_s: float = 60) -> bool:
    """Wait until the process has ended; whether it did in time."""
    deadline = time.monotonic() + timeout_s
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
