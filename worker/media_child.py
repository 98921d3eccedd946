"""The process that decodes images and videos: bytes in, RGB frames out, and nothing else that a file could make of it.

Decoders are large, written in C and fed by strangers. So they run here: without a device, a key or a setting and, once
`confine` has run, without a way to open a file or a connection, since the kernel gives it no descriptor any more. It
never sees a path: a file comes, and each frame goes, through memory that it shares with its parent.
"""

import contextlib
import ctypes
import io
import json
import math
import mmap
import os
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterable
from typing import Any, Final

import av
import numpy as np
from av.video.frame import VideoFrame
from PIL import Image, MpoImagePlugin

from d3serve.errors import InvalidMedia
from d3serve.media.sizes import SHARED_BYTES, MediaKind
from d3serve.worker.decoding import IMAGE_FORMATS, Pixels, Video, image

MESSAGE_BYTES: Final = 4096
MORE_BYTES: Final = (
    1536 * 2**20
)  # beyond what it has at its start: twenty pictures of 4K in full colour, at 10 bits
LOADED_LATE: Final = (MpoImagePlugin,)  # by Pillow, when it meets such a file
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38


def main() -> None:
    """Serve the parent that left us a socket and memory: `media_child <socket> <memory> <its process id>`."""
    number, memory, parent = map(int, sys.argv[1:4])
    channel, shared = socket.socket(fileno=number), mmap.mmap(memory, SHARED_BYTES)
    rehearse()
    confine(parent)
    tell(channel, ready=True)
    while asked := channel.recv(MESSAGE_BYTES):
        file = json.loads(asked)
        allow(file["processor_s"])
        try:
            for seconds, pixels in frames(file["kind"], shared[: file["bytes"]]):
                height, width, _ = pixels.shape
                np.frombuffer(shared, np.uint8, pixels.size).reshape(pixels.shape)[:] = pixels
                tell(channel, frame=[height, width], seconds=seconds)
                channel.recv(MESSAGE_BYTES)  # it has been taken
        except InvalidMedia as error:
            tell(channel, refused=error.message)
        except MemoryError:
            tell(channel, refused="takes more memory to decode than a file may")
        except Exception as error:  # a decoder's: there is no end to what they raise
            tell(channel, refused=f"cannot be decoded ({type(error).__name__})")
        else:
            tell(channel, done=True)


def frames(kind: MediaKind, data: bytes) -> Iterable[tuple[float, Pixels]]:
    """The frames of a file, with their times; an image is one."""
    return Video(data).frames() if kind == "video" else [(0.0, image(data))]


def tell(channel: socket.socket, **what: Any) -> None:
    """Send a message."""
    channel.send(json.dumps(what).encode())


def confine(parent: int) -> None:
    """Give up, for good, whatever decoding does not need; end with the parent."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked to end with it
        sys.exit()
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (held + MORE_BYTES, held + MORE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a picture is nobody's to leave on a disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def allow(processor_s: int) -> None:
    """Have the kernel end this process once it has taken so much more of a processor."""
    most = math.ceil(time.process_time()) + processor_s
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def rehearse() -> None:
    """Decode one of each kind, so that whatever is loaded late is loaded while files can still be opened."""
    warnings.simplefilter("ignore")  # Pillow's are about what we do on purpose
    for name in IMAGE_FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (32, 32)).save(file, name)
        image(file.getvalue())
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for frame in (VideoFrame(32, 32, "yuv420p"), None):
            container.mux(stream.encode(frame))
    list(Video(file.getvalue()).frames())
    with contextlib.suppress(av.FFmpegError):  # what fails has its own things to load
        Video(b"\0\0\0\x08ftypmp42")


if __name__ == "__main__":
    main()
