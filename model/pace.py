"""Pace: how far the host may run ahead of the device."""

from collections import deque

import torch

AHEAD = (
    1  # steps that may wait behind the one that runs: the device never idles, and a short pass waits for two
)


class Pace:
    """Keeps the launches of a long pass close to what the device does, so that other work can step in soon."""

    def __init__(self, device: torch.device) -> None:
        """Pace the current stream of `device`; a CPU needs none."""
        self._launched: deque[torch.cuda.Event] | None = deque() if device.type == "cuda" else None

    def wait(self) -> None:
        """Return when the device has finished all but `AHEAD` of the steps launched so far."""
        if self._launched is None:
            return
        # It sleeps instead of spinning: the worker's other threads want the core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch has no types for it
        event.record()
        self._launched.append(event)
        if len(self._launched) > AHEAD:
            self._launched.popleft().synchronize()
