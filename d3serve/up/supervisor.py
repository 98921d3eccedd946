"""A process tree that lives and dies together: what `d3serve up` is made of."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from d3serve.errors import StartupError

STOP_TIMEOUT_S = 30.0
LEAVE_S = 10.0  # what a process may take to leave beside the worker's grace
EXIT_WITH_PARENT = "--exit-with-parent"  # the flag of every process of a tree
LONGEST_WORDS_BYTES = 4096
STDIN = 0


class ProcessTree:
    """Children of one parent: when any ends, or the parent is told to stop, all of them end.

    A child holds one end of a pair of sockets as its standard input and stops at EOF (`exit_with_parent`), so
    that a parent killed with SIGKILL leaves no orphan either; this works on Linux and macOS alike. The other
    way goes why it ends, if it knows (`tell_parent`).
    """

    def __init__(
        self, keep: Callable[[], None] = lambda: None, *, stop_timeout_s: float = STOP_TIMEOUT_S
    ) -> None:
        """`keep` is called again and again while the tree lives, to look after what is no child of it."""
        self._stop_timeout_s = stop_timeout_s
        self._keep = keep
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._words: dict[str, socket.socket] = {}
        self._stopping = threading.Event()

    def start(
        self, name: str, argv: Sequence[str], env: dict[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        """Start `python -m d3serve <argv>` with `env` over the present environment."""
        command = [sys.executable, "-P", "-m", "d3serve", *argv, EXIT_WITH_PARENT]
        ours, theirs = socket.socketpair()
        self._words[name] = ours
        self._children[name] = subprocess.Popen(  # noqa: S603 - our own module, no shell
            command,
            env={**os.environ, **env},
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,  # ours log to standard error; Celery's farewell would end up among the answers
            pass_fds=pass_fds,
            start_new_session=True,
        )
        theirs.close()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Return when `ready()` is true.

        Raises:
            StartupError: a child ended first, `timeout_s` passed, or `keep` failed.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            self._keep()
            ended = self.ended()
            if ended:
                raise StartupError(self._last_words(ended))
            if time.monotonic() > deadline:
                raise StartupError(f"{what} did not come up within {timeout_s:g} s")
            if self._stopping.wait(0.05):
                raise StartupError("stopped while starting")

    def ended(self) -> str | None:
        """The name of a child that has ended, if any has."""
        return next((name for name, child in self._children.items() if child.poll() is not None), None)

    def run(self) -> None:
        """Block until a signal asks to stop.

        Raises:
            StartupError: a child ended, or `keep` failed.
        """
        while not self._stopping.wait(0.2):
            self._keep()
            if ended := self.ended():
                raise StartupError(self._last_words(ended))

    def _last_words(self, name: str) -> str:
        ended, words = f"the {name} process ended", b""
        with contextlib.suppress(OSError):  # nothing was said, or the end left some of ours unread
            words = self._words[name].recv(LONGEST_WORDS_BYTES, socket.MSG_DONTWAIT)
        if words:
            return f"{ended}: {words.decode(errors='replace')}"
        return f"{ended} with exit code {self._children[name].returncode}; what it logged above says why"

    def stop(self) -> None:
        """End every child: SIGTERM, then SIGKILL for those still there after `stop_timeout_s`."""
        for child in self._children.values():
            if child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + self._stop_timeout_s
        for child in self._children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for words in self._words.values():
            words.close()

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Within the block SIGTERM and SIGINT ask `run` to return; afterwards all children are ended."""

        def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
            self._stopping.set()

        before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            self.stop()
            for number, handler in before.items():
                signal.signal(number, handler)


def exit_with_parent(within_s: float) -> None:
    """From now on this process gets SIGTERM when its standard input reaches EOF: its parent is gone.

    If it is still there after `within_s`, it ends all the same, and what it started with it, as its parent would have
    seen to: a worker may wait for a broker that went with the parent, and hold its GPU meanwhile.
    """

    def watch() -> None:
        while os.read(STDIN, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(within_s)
        if os.getpgrp() == os.getpid():  # as `ProcessTree` starts it
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def tell_parent(reason: str) -> bool:
    """Let a parent that is a `ProcessTree` end with the reason for which this process ends; whether there is one."""
    if EXIT_WITH_PARENT in sys.argv:  # only then standard input is the parent's socket
        with contextlib.suppress(OSError):
            os.write(STDIN, reason.encode()[:LONGEST_WORDS_BYTES])
            return True
    return False


def bind(host: str, port: int) -> socket.socket:
    """A listening socket to hand to the API by file descriptor, so that port 0 is known before it starts.

    Raises:
        StartupError: the address is taken or not ours.
    """
    return _listener(host, port)


@contextlib.contextmanager
def listening(host: str, port: int, processes: int) -> Iterator[list[socket.socket]]:
    """A listening socket for each of several processes, all on one port, open within the block.

    On Linux the kernel then deals connections out evenly. Of one socket for all, whoever wakes first takes every
    connection that waits: of 32 opened at once by a client, one of two processes got 21 to all 32.

    Raises:
        StartupError: the address is taken or not ours.
    """
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_listener(host, port, spread=False))  # finds out whether the port is free
        if processes == 1 or sys.platform != "linux":
            yield [first] * processes
            return
        port = first.getsockname()[1]
        first.close()
        yield [stack.enter_context(_listener(host, port, spread=True)) for _ in range(processes)]


def _listener(host: str, port: int, *, spread: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if spread:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener.listen(2048)
    listener.set_inheritable(True)
    return listener
