"""Media of states, decoded ahead of the pass that reads them, by a process that may die of any of them."""

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from d3serve.errors import InternalError, InvalidMedia, Overloaded, ShuttingDown
from d3serve.media.sizes import FRAMES, SHARED_BYTES, MediaKind, frame_size, image_size, pair_times
from d3serve.model.media import TEMPORAL, Medium
from d3serve.model.resize import resized

CHILD: Final = "d3serve.worker.media_child"
START_S: Final = 60.0  # to load its libraries, on a host that is busy
# For a whole file. What it takes of a processor is its own, and too much of that is its fault: the longest video of the
# largest frames takes about 10 s of the four threads that decode it. How long that lasts is up to the host as well.
PROCESSOR_S: Final = 120
WAIT_S: Final = 300.0
KEPT_BYTES: Final = 256 * 2**20  # of decoded media: those of a turn or two, and what is asked about again
MESSAGE_BYTES: Final = 4096
PASSED_ON: Final = (
    "LANG",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONPATH",
)  # of the environment; the rest holds secrets

Pixels = NDArray[np.uint8]
Decoded = Iterator[tuple[float, Pixels]]  # frames [height, width, 3], with their times in seconds

log = structlog.get_logger(__name__)


class ProcessLostError(Exception):
    """The process ended, or says what it should not."""


class TooSlowError(Exception):
    """The process has not answered in time, which may be the host's fault."""


class DecodingProcess:
    """A process that runs `media_child`; for one thread, whose end it does not survive."""

    def __init__(self) -> None:
        """Start it and wait for it to be ready.

        Raises:
            InternalError: it does not start.
        """
        # A message is a packet: none can be cut off, so that nobody waits for the rest of one.
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create("d3serve-media")
        with theirs:
            os.ftruncate(memory, SHARED_BYTES)
            self._shared = mmap.mmap(memory, SHARED_BYTES)
            inherited = (theirs.fileno(), memory)
            self._process = subprocess.Popen(  # noqa: S603 # our own module
                [sys.executable, "-P", "-m", CHILD, *map(str, inherited), str(os.getpid())],
                pass_fds=inherited,
                env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # decoders quote files
            )
            os.close(memory)
        self.busy = False  # with a file; if it is left so, it waits for what nobody will tell it
        try:
            self._hear(time.monotonic() + START_S)
        except (ProcessLostError, TooSlowError):
            self.close()
            raise InternalError("the process that decodes images and videos does not start") from None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def frames(self, kind: MediaKind, data: bytes) -> Decoded:
        """The frames of a file; each is gone when the next is asked for.

        Raises:
            InvalidMedia: the file is refused; the process goes on.
            ProcessLostError, TooSlowError: it is of no more use.
        """
        self.busy, deadline = True, time.monotonic() + WAIT_S
        self._shared[: len(data)] = data
        asked = {"kind": kind, "bytes": len(data), "processor_s": PROCESSOR_S}
        self._tell(json.dumps(asked).encode())
        while "done" not in (told := self._hear(deadline)):
            if "refused" in told:
                self.busy = False
                raise InvalidMedia(str(told["refused"]))
            seconds, (height, width) = float(told["seconds"]), map(int, told["frame"])
            if min(height, width) < 1 or 3 * height * width > SHARED_BYTES:
                raise ProcessLostError
            pixels = np.frombuffer(self._shared, np.uint8, 3 * height * width)
            yield seconds, pixels.reshape(height, width, 3)
            self._tell(b"taken")
        self.busy = False

    @property
    def exhausted(self) -> bool:
        """Whether the kernel has ended it, because a file took too much of a processor."""
        return self._process.returncode == -signal.SIGXCPU

    def end(self) -> None:
        """End it, from any thread."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it, and give its channel back."""
        self.end()
        self._channel.close()

    def _tell(self, message: bytes) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise ProcessLostError from None

    def _hear(self, deadline: float) -> dict[str, Any]:
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            told = json.loads(self._channel.recv(MESSAGE_BYTES))
        except TimeoutError:
            raise TooSlowError from None
        except (OSError, ValueError):  # an end is an empty message, and no JSON
            raise ProcessLostError from None
        if not isinstance(told, dict):
            raise ProcessLostError
        return told


class MediaDecoder:
    """Decodes files in the order in which they are asked for, while others do other things; keeps the latest."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "d3serve-media")
        self._process: DecodingProcess | None = None
        self._closing = False
        self._kept: OrderedDict[tuple[MediaKind, str], Future[Medium]] = OrderedDict()

    def begin(self, kind: MediaKind, digest: str, data: Callable[[], bytes]) -> Future[Medium]:
        """The medium of a file, once it is decoded, by the SHA-256 of the file; `data` is asked for it if need be.

        For one thread. The future raises InvalidMedia where the file is broken, past a limit, or ends the process that
        decodes it; Overloaded where that does not answer, and nothing shows the file to be at fault; ShuttingDown once
        the decoder is closed.
        """
        name = (kind, digest)
        known = self._kept.get(name)
        if known is None or (known.done() and known.exception()):
            known = self._kept[name] = self._thread.submit(self._decode, kind, digest, data)
        self._kept.move_to_end(name)
        self._forget()
        return known

    def close(self) -> None:
        """End thread and process, also one at work; what waits is not decoded."""
        self._closing = True
        if (process := self._process) is not None:
            process.end()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._drop()

    def _forget(self) -> None:
        done = [name for name, known in self._kept.items() if known.done()]
        held = {name: _bytes_of(self._kept[name]) for name in done}
        spare = sum(held.values()) - KEPT_BYTES
        for name in done:
            if spare > 0 or not held[name]:
                spare -= held[name]
                del self._kept[name]

    def _decode(self, kind: MediaKind, digest: str, data: Callable[[], bytes]) -> Medium:
        """Decode with a process that lives; one that dies is replaced, and the file given a second chance."""
        file, silent = data(), False
        about = {"kind": kind, "digest": digest[:16], "size_bytes": len(file)}
        for _ in range(2):
            process = self._ready()
            try:
                return _MEDIA[kind](digest, process.frames(kind, file))
            except TooSlowError:
                silent = True
                log.warning("media.process_silent", **about)
            except (
                ProcessLostError,
                LookupError,
                TypeError,
                ValueError,
            ):  # it ended, or says what it should not
                self._drop()
                if process.exhausted:
                    raise InvalidMedia(f"takes more than {PROCESSOR_S} s of a processor to decode") from None
                if not self._closing:
                    log.warning("media.process_lost", **about)
            finally:
                if process.busy:
                    self._drop()
        if silent:
            raise Overloaded(
                f"a file was not decoded in {WAIT_S:.0f} s, on a host that may be busy: send the request again"
            )
        raise InvalidMedia("ends the process that decodes it")

    def _ready(self) -> DecodingProcess:
        if self._process is None and not self._closing:
            self._process = DecodingProcess()
        if (
            self._process is None or self._closing
        ):  # asked again, now that it stands where `close` looks for it
            raise ShuttingDown("the worker is stopping")
        return self._process

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


def _image(digest: str, decoded: Decoded) -> Medium:
    [frame] = [resized(pixels, *image_size(pixels.shape[1], pixels.shape[0])) for _, pixels in decoded]
    return Medium("image", digest, frame[None])


def _video(digest: str, decoded: Decoded) -> Medium:
    """Resize frames as they come, since all at once take 800 MB; an odd one at the end stands twice."""
    times: list[float] = []
    first: list[Pixels] = []
    later: list[Pixels] = []
    for seconds, pixels in decoded:
        height, width, _ = pixels.shape
        times.append(seconds)
        if len(times) <= TEMPORAL:
            first.append(pixels.copy())  # two alone may be read at another size
        else:
            later.append(resized(pixels, *frame_size(FRAMES[1], width, height)))
    if not times:
        raise InvalidMedia("has no frame that can be decoded")
    odd = len(times) % TEMPORAL
    size = frame_size(len(times) + odd, width, height)
    frames = [*(resized(pixels, *size) for pixels in first), *later]
    frames += frames[-1:] * odd
    return Medium("video", digest, np.stack(frames), pair_times(times + times[-1:] * odd))


_MEDIA: Final = {"image": _image, "video": _video}


def _bytes_of(known: Future[Medium]) -> int:
    return 0 if known.exception() else known.result().frames.nbytes
