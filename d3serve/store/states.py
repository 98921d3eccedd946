"""Where large states stay: in Redis like small ones, or as files that Redis refers to.

A file is written before the job that needs it exists, under a name that is used once, and `st:<group>` then holds
`@<name> <bytes>` in the state's place. So a file has one writer and one reference: it is needed exactly as long as
that reference stands, which the scripts see to as they do for any state. A sweep removes what nobody refers to.
"""

import asyncio
import errno
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

from d3serve.errors import RequestErased, StateLost, StorageUnavailable
from d3serve.store.encode import EncodedJob
from d3serve.store.private import make_private, opener
from d3serve.store.table import AsyncTable

LARGE_BYTES: Final = 256 * 2**10  # smaller ones are cheaper to send than to ask for: docs/adr/0006
GRACE_S: Final = 120.0  # a submission is refused or written long before its file is this old
SWEEP_EVERY_S: Final = 30.0
FREE_BYTES: Final = (
    64 * 2**20
)  # left for whoever else writes there: the embedded broker's file may be on this disk
REFERENCE: Final = "@"  # no stored state begins with it
# What Redis says becomes a path only if it is one that we write: others may write to Redis too.
FOLDER: Final = re.compile(r"[0-9a-f]{16}")
OURS: Final = re.compile(  # the last part stands in the names of files that `mend` has not finished
    REFERENCE + FOLDER.pattern + r"/[0-9a-f]{40}\.[0-9a-f]{16}(\.[0-9a-f]{8})? [0-9]{1,15}"
)
SWEEP_AT_ONCE: Final = 1_000

Submit = Callable[[str | bytes], Awaitable[list[Any]]]

log = structlog.get_logger(__name__)


class StateFolder:
    """The files under one folder; blocking, so the API calls it from threads."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, folder: str, group: str, state: bytes) -> str:
        """Store a state for good and return the reference to it.

        Raises:
            StorageUnavailable: the disk is full, or the folder cannot be written to.
        """
        reference = f"{REFERENCE}{folder}/{group}.{secrets.token_hex(8)} {len(state)}"
        self._write(self._path(reference), state)
        return reference

    def mend(self, reference: str, state: bytes) -> None:
        """Store a state again under the name that jobs refer to. Raises like `write`."""
        path = self._path(reference)
        spare = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        self._write(spare, state)
        spare.replace(path)

    def holds(self, reference: str) -> bool:
        """Whether the file is there, as long as it should be."""
        with suppress(OSError):
            return self._path(reference).stat().st_size == _size(reference)
        return False

    def read(self, reference: str) -> str:
        """The state as it was written.

        Raises:
            StateLost: the file is gone or cut short, or the reference is none of ours.
        """
        with suppress(OSError), open(self._path(reference), "rb", opener=opener) as file:
            text = file.read()
            if len(text) == _size(reference):
                return text.decode()
        raise StateLost("the state of this job is no longer in the folder of states; submit it again")

    def remove(self, reference: str) -> None:
        """Delete a file that nobody will refer to."""
        self._path(reference).unlink(missing_ok=True)

    def settled(self, folder: str) -> Iterator[str]:
        """References to the files old enough for their jobs to have been written or refused."""
        with suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
            settled_before = _file_time(self._root / folder) - GRACE_S
            for entry in entries:
                with suppress(FileNotFoundError):  # another process sweeps too
                    found = entry.stat(follow_symlinks=False)
                    reference = f"{REFERENCE}{folder}/{entry.name} {found.st_size}"
                    if found.st_mtime < settled_before and OURS.fullmatch(reference):
                        yield reference

    def _path(self, reference: str) -> Path:
        if not OURS.fullmatch(reference):
            raise StateLost("the job table refers to a state in a file that d3serve never wrote")
        return self._root / reference[len(REFERENCE) :].rpartition(" ")[0]

    def _write(self, path: Path, state: bytes) -> None:
        try:
            make_private(path.parent)
            if shutil.disk_usage(path.parent).free < len(state) + FREE_BYTES:
                raise OSError(errno.ENOSPC, "the disk is nearly full")
            with open(path, "xb", opener=opener) as file:
                file.write(state)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise StorageUnavailable(f"the state cannot be stored: {error.strerror}") from error


def _file_time(folder: Path) -> float:
    """The time by the clock that stamps the files of a folder: hosts that share it need not agree on theirs."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime
    return time.time()  # a full disk must still be swept


def _settled(files: StateFolder, folders: Sequence[str]) -> list[str]:
    return [reference for folder in folders for reference in files.settled(folder)]


def _size(reference: str) -> int:
    return int(reference.rpartition(" ")[2])


def group_of(reference: str) -> str:
    """The state group that a file was written for."""
    return reference.rpartition("/")[2].partition(".")[0]


async def queue_folder(table: AsyncTable) -> str:
    """The folder of this queue: another queue that shares the root must not sweep ours.

    Raises:
        StorageUnavailable: its name is none of ours.
    """
    key = table.key("folder")
    await table.send("set", key, secrets.token_hex(8), nx=True)
    name = str(await table.send("get", key))
    if not FOLDER.fullmatch(name):
        raise StorageUnavailable("the job table names a folder of states that d3serve never made")
    return name


def piece_folder(folder: str) -> str:
    """The folder of pieces of files, beside that of states: a version that knows no pieces must not sweep them."""
    return hashlib.sha256(folder.encode()).hexdigest()[:16]


class LargeStates:
    """What the API does with large states: sends each once, and removes the files that nobody refers to."""

    def __init__(self, table: AsyncTable, root: Path | None) -> None:
        self._table = table
        self._files = StateFolder(root) if root else None
        self._folder = ""
        self._sweep_at = 0.0

    async def submit(self, job: EncodedJob, submit: Submit) -> list[Any]:
        """Run SUBMIT with the state, or a reference to it, or neither where it is stored already; its answer.

        A file that is missing is written again before the job exists: a worker may take that at once.
        """
        if len(job.state) < LARGE_BYTES:
            return await submit(job.state)
        [kept] = await self._stored([job.group])
        if kept:
            await self._mend(kept, job)
            answer = await submit("")
            if answer[0] != "state":  # it went meanwhile
                return answer
        if self._files is None:
            return await submit(job.state)
        folder = await self._folder_name()
        written = await asyncio.to_thread(self._files.write, folder, job.group, job.state)
        answer = await submit(written)
        if written not in answer:  # refused, or another job of the group was quicker
            await asyncio.to_thread(self._files.remove, written)
        return answer

    async def asked(self, job_id: str) -> tuple[str, str]:
        """What a job was asked: the texts of its state and of its questions.

        Raises:
            RequestErased: one of them is gone.
        """
        key = self._table.key
        group = await self._table.send("hget", key("job", job_id), "group")
        kept, questions = await self._table.send("mget", key("st", group or ""), key("body", job_id))
        if kept is not None and kept.startswith(REFERENCE) and self._files is not None:
            with suppress(StateLost):
                kept = await asyncio.to_thread(self._files.read, kept)
        if kept is None or questions is None or kept.startswith(REFERENCE):
            raise RequestErased(f"what job {job_id} was asked is no longer kept: it goes before the job does")
        return str(kept), str(questions)

    async def sweep(self) -> None:
        """Remove files that nobody refers to; at most twice a minute."""
        if self._files is None or time.monotonic() < self._sweep_at:
            return
        self._sweep_at = time.monotonic() + SWEEP_EVERY_S
        folder = await self._folder_name()
        found = await asyncio.to_thread(_settled, self._files, (folder, piece_folder(folder)))
        for start in range(0, len(found), SWEEP_AT_ONCE):
            some = found[start : start + SWEEP_AT_ONCE]
            kept = await self._stored([group_of(reference) for reference in some])
            for reference in set(some).difference(kept):
                await asyncio.to_thread(self._files.remove, reference)

    async def _mend(self, kept: str, job: EncodedJob) -> None:
        if self._files is None or not kept.startswith(REFERENCE):
            return
        if not OURS.fullmatch(kept):
            log.error("state.foreign_reference", group=job.group)
        elif not self._files.holds(kept):
            log.warning("state.mended", group=job.group)
            await asyncio.to_thread(self._files.mend, kept, job.state)

    async def _stored(self, groups: list[str]) -> list[str]:
        return list(await self._table.run("stored", *groups))

    async def _folder_name(self) -> str:
        self._folder = self._folder or await queue_folder(self._table)
        return self._folder
