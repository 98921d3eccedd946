"""A state as a file: all its bytes in the pools' order, then what they are and the sums that they must give."""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final, Self

import torch
from torch import Tensor

MAGIC: Final = b"d3state1"
TAIL_BYTES: Final = 8 + len(MAGIC)  # checksum and length of the description before it, and MAGIC
CHUNK_BYTES: Final = 16 * 2**20
MOST_TOLD_BYTES: Final = 2**20  # of a description: 20 KB are told of the longest state
READERS: Final = 8  # one reads and sums 1 to 2 GB/s; 117,000 tokens of the 27B are 7.8 GB


@dataclass(frozen=True)
class StateFile:
    """What a file says of the state in it."""

    key: str
    length: int  # K/V rows
    delta: int  # as in `Entry`
    size: int  # bytes of the state
    sums: tuple[int, ...]  # CRC-32 of each chunk

    def packed(self) -> bytes:
        """The end of the file."""
        text = json.dumps(asdict(self)).encode()
        return b"".join(
            (text, zlib.crc32(text).to_bytes(4, "little"), len(text).to_bytes(4, "little"), MAGIC)
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """What stands at the end of a file.

        Raises:
            OSError: it cannot be read.
            ValueError: that is no description, or not as it was written.
        """
        with _opened(path, os.O_RDONLY) as file:
            size = os.fstat(file.fileno()).st_size
            tail = os.pread(file.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
            told_bytes = int.from_bytes(tail[4:8], "little")
            begin = size - TAIL_BYTES - told_bytes
            if tail[8:] != MAGIC or begin < 0 or told_bytes > MOST_TOLD_BYTES:
                raise ValueError("it has no end")
            text = os.pread(file.fileno(), told_bytes, begin)
        if zlib.crc32(text) != int.from_bytes(tail[:4], "little"):
            raise ValueError("its description is damaged")
        told = json.loads(text)
        try:
            found = cls(**(told | {"sums": tuple(told["sums"])}))
        except (KeyError, TypeError):
            raise ValueError("its description is of another kind") from None
        if found.size != begin or len(found.sums) != -(-begin // CHUNK_BYTES):
            raise ValueError("bytes of it are missing")
        return found


class StateReader:
    """Reads states into the pools, several chunks at once. For one thread: the buffers are its own."""

    def __init__(self, *, pinned: bool) -> None:
        """Take the buffers at once: to pin memory stalls passes."""
        self._buffers = [new_buffer(pinned=pinned) for _ in range(READERS)]
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="state-reader")

    def read(self, path: Path, kept: StateFile, parts: Sequence[Tensor]) -> None:
        """Fill `parts` with the state.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds another state, or is not as it was written; what is in `parts` then is of no use.
        """
        if kept.size != sum(part.nbytes for part in parts):
            raise ValueError("it is of other sizes")
        stream = torch.cuda.current_stream() if parts[0].is_cuda else None
        with _opened(path, os.O_RDONLY) as file:
            share = partial(self._read_share, file.fileno(), kept, parts, stream)
            shares = [self._threads.submit(share, first) for first in range(READERS)]
            # For all of them: one that goes on would write into rows that are another state's by then.
            wait(shares)
        if not all(each.result() for each in shares):
            raise ValueError("its bytes are not those that were written")

    def _read_share(
        self,
        file: int,
        kept: StateFile,
        parts: Sequence[Tensor],
        stream: torch.cuda.Stream | None,
        first: int,
    ) -> bool:
        """Read every eighth chunk from `first` on; whether all are as they were written."""
        for number in range(first, len(kept.sums), READERS):
            begin = number * CHUNK_BYTES
            chunk = self._buffers[first][: min(CHUNK_BYTES, kept.size - begin)]
            view = memoryview(chunk.numpy().data)
            if not _fill(file, begin, view) or zlib.crc32(view) != kept.sums[number]:
                return False
            with torch.inference_mode(), on(stream):
                for host, part in _overlaps(chunk, begin, parts):
                    part.copy_(host, non_blocking=True)
            if stream is not None:
                stream.record_event().synchronize()  # before the buffer is filled again
        return True


def write_state(
    path: Path,
    about: tuple[str, int, int],
    parts: Sequence[Tensor],
    buffer: Tensor,
    take: Callable[[Callable[[], None]], bool],
) -> bool:
    """Write a state to a new file; whether `take`, which is called to copy each chunk to the host, did so to the end.

    `about` is its key, length and delta.

    Raises:
        OSError: it cannot be written.
    """
    size, sums = sum(part.nbytes for part in parts), []
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        for begin in range(0, size, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, size - begin)]
            if not take(partial(_copy_out, chunk, begin, parts)):
                return False
            view = memoryview(chunk.numpy().data)
            sums.append(zlib.crc32(view))
            _write_all(file.fileno(), view)
        _write_all(file.fileno(), memoryview(StateFile(*about, size, tuple(sums)).packed()))
    return True


def new_buffer(*, pinned: bool) -> Tensor:
    """Host memory for one chunk."""
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Within the block copies go to the stream; on a CPU there is none."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _copy_out(chunk: Tensor, begin: int, parts: Sequence[Tensor]) -> None:
    for host, part in _overlaps(chunk, begin, parts):
        host.copy_(part, non_blocking=True)


def _overlaps(chunk: Tensor, begin: int, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pieces of a chunk that begins at byte `begin` of all parts, each with its place in a part."""
    start, end = 0, begin + len(chunk)
    for part in parts:
        first, last = max(begin, start), min(end, start + part.nbytes)
        if first < last:
            yield (
                chunk[first - begin : last - begin],
                part.view(-1).view(torch.uint8)[first - start : last - start],
            )
        start += part.nbytes


def _fill(file: int, offset: int, view: memoryview) -> bool:
    """Read into all of `view`; whether the file has so many bytes."""
    filled = 0
    while filled < len(view):
        count = os.preadv(file, [view[filled:]], offset + filled)
        if not count:
            return False
        filled += count
    return True


def _write_all(file: int, view: memoryview) -> None:
    while view:
        view = view[os.write(file, view) :]


def _opened(path: Path, flags: int) -> IO[bytes]:
    """A file that is ours alone to read, no link to another, and no pipe that nobody writes to."""
    mode = "rb" if flags == os.O_RDONLY else "wb"
    return os.fdopen(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600), mode, buffering=0)
