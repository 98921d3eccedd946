"""Files and folders that hold what users said: nobody but their owner may read them, whatever the umask."""

import os
from pathlib import Path
from typing import IO, Final

PRIVATE_FOLDER: Final = 0o700
PRIVATE_FILE: Final = 0o600


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing; raises OSError.

    `mkdir(parents=True)` would leave the mode of those above to the umask.
    """
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    except FileNotFoundError:
        make_private(folder.parent)
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def opener(path: str, flags: int) -> int:
    """An `opener` of `open`: makes the file private, and follows no link to a file of somebody else."""
    return os.open(path, flags | os.O_NOFOLLOW, PRIVATE_FILE)


def open_private(path: Path) -> IO[bytes]:
    """Open a file to add to it, made if it is missing; raises OSError, also where it is a link."""
    return open(path, "ab", opener=opener)
