"""Stands in for the process that decodes: it does what a broken decoder could make the real one do."""

import json
import mmap
import os
import signal
import socket
import sys
import time

from d3serve.media.sizes import SHARED_BYTES
from d3serve.worker.media_child import allow, confine

FAR = 10**9


def tries():
    """What it may still do of what it may not."""
    for name, act in {
        "open": lambda: os.open("/etc/hostname", os.O_RDONLY),
        "write": lambda: os.open("d3serve-was-here", os.O_WRONLY | os.O_CREAT),
        "connect": lambda: socket.create_connection(("127.0.0.1", 1), 1),
        "listen": socket.socket,
        "memory": lambda: bytes(4 * 2**30),
    }.items():
        try:
            act()
        except (OSError, MemoryError) as error:
            yield f"{name} {type(error).__name__}"
        else:
            yield f"{name} done"


def main():  # noqa: C901 # one thing after the other
    """Serve as `media_child` does, and answer every file by what the file says."""
    number, memory, parent = map(int, sys.argv[1:4])
    channel, shared = socket.socket(fileno=number), mmap.mmap(memory, SHARED_BYTES)
    confine(parent)
    channel.send(b'{"ready": true}')
    while asked := channel.recv(4096):
        file = json.loads(asked)
        allow(file["processor_s"])
        match shared[: file["bytes"]].decode().split():
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["die", "after"]:
                channel.send(b'{"frame": [4, 4], "seconds": 0}')
                channel.recv(4096)
                os.kill(os.getpid(), signal.SIGSEGV)
            case ["sleep"]:
                time.sleep(FAR)
            case ["burn"]:
                while True:
                    pass
            case ["work", _]:
                until = time.process_time() + 0.5
                while time.process_time() < until:
                    pass
                channel.send(b'{"refused": "worked"}')
            case ["stop"]:
                os.kill(os.getpid(), signal.SIGSTOP)
                channel.send(b'{"refused": "went on"}')
            case ["try"]:
                channel.send(json.dumps({"refused": ", ".join(list(tries()))}).encode())
            case ["say", what]:
                channel.send(what.encode())
            case ["fine"]:
                channel.send(b'{"frame": [40, 40], "seconds": 0}')
                channel.recv(4096)
                channel.send(b'{"done": true}')


main()
