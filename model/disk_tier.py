"""DiskTier: long states in files, which outlive the process. To read a file takes a second where the state takes many.

A state is written when it is asked about again, by a thread beside the passes, and read back before a pass that needs
it and finds it nowhere else. A file is whole or it is not there: it gets its name once all of it is written, and one
that is not as it was written is removed, and its state read by the model as if there had been none. The workers of a
host may share a folder.
"""

import hashlib
import logging
import os
import secrets
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import torch

from d3serve.errors import InvalidSettings
from d3serve.model.backbone import Pools
from d3serve.model.placement import name_of
from d3serve.model.ranges import Entry
from d3serve.model.state_files import StateFile, StateReader, new_buffer, on, write_state

FOLDER: Final = "d3serve-states"  # ours alone, inside the one that is given: that may be the root of a volume
WHOLE, UNFINISHED = ".state", ".new"
LEAST_TOKENS: Final = 4096  # the 27B reads these in 0.33 s, and a drive of 1.3 GB/s the file of 0.4 GB
SHARE: Final = 0.5  # of what the disk would have free without these files
SWEEP_EVERY_S: Final = 60.0
ABANDONED_S: Final = 600.0  # no process leaves a file for so long between two chunks that it writes

log = logging.getLogger(__name__)


class DiskTier:
    """Files of states in `pools`. For one thread, beside the one that it writes with."""

    def __init__(self, pools: Pools, folder: Path, ttl_s: float) -> None:
        """Keep files in `folder` for as long as somebody asks about their states every `ttl_s`.

        Raises:
            InvalidSettings: it cannot be written to, or others may write there.
        """
        self._pools, self._ttl_s = pools, ttl_s
        self._folder = own_folder(folder)
        device = pools.k.device
        # Whose bits they are, beside what a state's key says already: weights, types, tenant and tokens.
        self._numbers = ":".join((_release(), torch.__version__, name_of(device)))
        self._reader = StateReader(pinned=pools.k.is_cuda)
        self._buffer = new_buffer(pinned=pools.k.is_cuda)
        self._stream = torch.cuda.Stream(device) if pools.k.is_cuda else None  # type: ignore[no-untyped-call]
        self._to_write: SimpleQueue[tuple[Entry, torch.cuda.Event | None]] = SimpleQueue()
        self._taking = threading.Lock()  # while the thread reads the pools, or gives a file its name
        self._given_up = self._busy = False
        about = weakref.ref(self), self._to_write  # so the pools of an engine that is let go go with it
        threading.Thread(target=_serve, args=about, name="state-writer", daemon=True).start()

    def holds(self, key: str) -> bool:
        """Whether there is a file of the state, young enough to be read."""
        with suppress(OSError):
            return time.time() - self._path(key).stat().st_mtime < self._ttl_s
        return False

    def forget(self, key: str) -> None:
        """Remove the file of a state, if there is one."""
        with suppress(OSError):
            self._path(key).unlink()

    # --- from the disk -----------------------------------------------------------------------------------

    def find(self, key: str) -> StateFile | None:
        """What the file of a state says of it; None where there is no good one."""
        if self.holds(key):
            try:
                found = StateFile.read(self._path(key))
            except (OSError, ValueError) as error:
                self._remove_damaged(key, error)
            else:
                return found if found.key == key else None
        return None

    def load(self, kept: StateFile, entry: Entry) -> bool:
        """Read a state into its new place in the pools; False where not every bit of it is as it was."""
        path = self._path(kept.key)
        try:
            self._reader.read(path, kept, list(self._pools.parts(entry.start, entry.length, entry.slot)))
        except (OSError, ValueError) as error:
            self._remove_damaged(kept.key, error)
            return False
        self._touch(path)
        return True

    def _touch(self, path: Path) -> None:
        """Somebody asks about it."""
        with suppress(OSError):  # another worker has removed it meanwhile
            os.utime(path)

    def _remove_damaged(self, key: str, error: Exception) -> None:
        log.warning("the file of a state is removed: %s", getattr(error, "strerror", None) or error)
        self.forget(key)

    # --- to the disk -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a state is being written."""
        return self._busy

    def begin(self, entry: Entry) -> bool:
        """Begin to write a complete state; False where that is not worth it, is done, or another is being written.

        Its rows and slot must stay as they are until `busy` is False, or `give_up` has returned.
        """
        if entry.length < LEAST_TOKENS or self._busy:
            return False
        if self.holds(entry.key):
            self._touch(self._path(entry.key))
            return False
        written = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._given_up, self._busy = False, True
        self._to_write.put((entry, written))
        return True

    def give_up(self) -> None:
        """Leave the state that is being written; from here its place in the pools may be given to another."""
        with self._taking:
            self._given_up = True

    def write(self, entry: Entry, written: "torch.cuda.Event | None") -> None:
        """Write what `begin` was given; for the thread alone."""
        try:
            self._write(entry, written)
        except (
            Exception
        ) as error:  # the thread's edge: the disk is full, or the device lost, as a pass will find
            log.warning("a state was not written: %s", getattr(error, "strerror", None) or error)
        finally:
            self._busy = False

    def _write(self, entry: Entry, written: "torch.cuda.Event | None") -> None:
        path = self._path(entry.key)
        unfinished = path.with_name(f"{path.stem}.{secrets.token_hex(8)}{UNFINISHED}")
        parts = list(self._pools.parts(entry.start, entry.length, entry.slot))
        if not self._make_room(sum(part.nbytes for part in parts)):
            return
        if self._stream is not None and written is not None:
            self._stream.wait_event(written)
        about = (entry.key, entry.length, entry.delta)
        try:
            if write_state(unfinished, about, parts, self._buffer, self._take):
                with self._taking:
                    if not self._given_up:  # not synced: what a power cut takes away is found to be missing
                        unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _take(self, copy: Callable[[], None]) -> bool:
        """Let `copy` read the pools, unless this state has been given up; whether it did."""
        with self._taking:
            if self._given_up:
                return False
            with torch.inference_mode(), on(self._stream):
                copy()
            if self._stream is not None:
                self._stream.synchronize()
        return True

    def _make_room(self, size: int) -> bool:
        """Remove states that nobody has asked about for long, the longest first; whether `size` bytes have room."""
        files = sorted(self._files(WHOLE), key=lambda found: found[1].st_mtime)
        kept = sum(found.st_size for _, found in self._files(WHOLE, UNFINISHED))
        most = SHARE * (shutil.disk_usage(self._folder).free + kept)
        if size > most:
            return False  # to empty the folder would not help
        for path, found in files:
            if kept + size <= most:
                break
            path.unlink(missing_ok=True)
            kept -= found.st_size
        return kept + size <= most

    def sweep(self) -> None:
        """Remove states that nobody has asked about for too long, and what a process has left unfinished."""
        now = time.time()
        for path, found in self._files(WHOLE, UNFINISHED):
            if now - found.st_mtime > (self._ttl_s if path.suffix == WHOLE else ABANDONED_S):
                path.unlink(missing_ok=True)

    def _files(self, *suffixes: str) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.iterdir():
            if path.suffix in suffixes:
                with suppress(FileNotFoundError):  # another worker sweeps too
                    found = path.lstat()
                    if stat.S_ISREG(found.st_mode):
                        yield path, found

    def _path(self, key: str) -> Path:
        return self._folder / (hashlib.sha256(f"{self._numbers}:{key}".encode()).hexdigest() + WHOLE)


def _serve(
    tier: "weakref.ref[DiskTier]", waiting: "SimpleQueue[tuple[Entry, torch.cuda.Event | None]]"
) -> None:
    """What the thread does: it writes what is to be written, and sweeps, until there is no tier any more."""
    while (alive := tier()) is not None:
        with suppress(OSError):
            alive.sweep()
        del alive  # while it waits nothing keeps the tier
        with suppress(Empty):
            entry, written = waiting.get(timeout=SWEEP_EVERY_S)
            if (alive := tier()) is not None:
                alive.write(entry, written)
            del alive


def _release() -> str:
    """Which d3serve this is; a tree that nobody has installed has no number."""
    with suppress(PackageNotFoundError):
        return version("d3serve")
    return ""


def own_folder(folder: Path) -> Path:
    """The folder that holds the files, made where it is missing.

    Raises:
        InvalidSettings: it cannot be written to, or others may plant files there.
    """
    own = folder / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        writable = os.access(own, os.W_OK | os.X_OK)
    except OSError as error:
        raise InvalidSettings(f"cannot write to {own}: {error.strerror}", field="state_cache_dir") from None
    if not stat.S_ISDIR(found.st_mode) or not writable:
        raise InvalidSettings(f"cannot write to {own}", field="state_cache_dir")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise InvalidSettings(
            f"{own} is not this user's alone to write to: states that others plant there would be answered from",
            field="state_cache_dir",
        )
    return own
