"""From a file to a GPU: bytes read into pinned memory while those before them cross the bus."""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20  # two of these a thread; larger ones read no faster


class Staging:
    """Moves parts of one file to `device` through two pinned buffers: one fills while the other is copied.

    A copy from mapped pages would go through the driver's own small buffers, page fault by page fault.
    """

    def __init__(self, path: Path, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Open `path`."""
        self._device = device
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned) for _ in "ab"]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._file = os.open(path, os.O_RDONLY)

    def __enter__(self) -> Self:
        """Use in a `with` statement."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self, begin: int, end: int) -> Tensor:
        """Bytes `begin` to `end` of the file, uint8 on the device. The device's stream orders what comes after.

        Raises:
            EOFError: the file ends before `end`.
        """
        target = torch.empty(end - begin, dtype=torch.uint8, device=self._device)
        for start in range(0, len(target), len(self._buffers[0])):
            self._move(begin + start, target[start : start + len(self._buffers[0])])
        return target

    def _move(self, offset: int, target: Tensor) -> None:
        buffer, copied = self._buffers[0][: len(target)], self._copied[0]
        if copied is not None:
            copied.synchronize()  # what this buffer held before has left
        self._fill(offset, buffer)
        target.copy_(buffer, non_blocking=True)
        if self._pinned:
            self._copied[0] = torch.cuda.current_stream(self._device).record_event()
        self._buffers.reverse()
        self._copied.reverse()

    def _fill(self, offset: int, buffer: Tensor) -> None:
        view, filled = memoryview(buffer.numpy().data), 0
        while filled < len(view):
            count = os.preadv(self._file, [view[filled:]], offset + filled)
            if not count:
                raise EOFError(f"the file ends at byte {offset + filled}")
            filled += count
