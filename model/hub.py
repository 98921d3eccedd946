"""From a model's name to a folder: a local package, or a snapshot of a Hub repository at a pinned commit."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from d3serve.errors import InvalidCheckpoint
from d3serve.model.registry import NO_PUBLIC_LAYOUT, find

# What a loader reads. Code stays where it is: nothing of a package is executed unless that is asked for.
NEEDED_FILES = ("*.safetensors", "*.json", "*.jinja")
CODE_FILES = ("d3_format.py",)
TOKENIZER_FILES = ("*.txt",)  # vocabulary and merges, where a folder has them beside tokenizer.json
COMMIT = re.compile(r"[0-9a-f]{40}")
WHOLE_BYTES = 16 * 2**20  # a file so small is read whole for its digest; of a larger one
SAMPLES, SAMPLE_BYTES = 256, 4096  # so many pieces: reading 54 GB twice would double the time of a start


@dataclass(frozen=True)
class LocatedPackage:
    """A package's folder on this machine, under the name that clients ask for."""

    folder: Path
    name: str
    revision: str | None
    from_hub: bool = False

    @property
    def identity(self) -> str:
        """What tells these weights from others, also of the same name: a commit, or a digest of the folder's files.

        Whoever names a revision of a folder vouches for nothing: its files count whatever it is called.
        """
        if self.from_hub and self.revision:
            return self.revision
        digest = hashlib.sha256(f"{self.revision or ''}\0".encode())
        patterns = (*NEEDED_FILES, *TOKENIZER_FILES, *CODE_FILES)
        for path in sorted({path for pattern in patterns for path in self.folder.glob(pattern)}):
            if path.is_file():
                _digest_file(digest, path)
        return digest.hexdigest()


def served_name(model: str) -> str:
    """The name of a package for clients: its folder's own, or its Hub id; known before there is a folder."""
    folder = Path(os.path.expanduser(model))
    return folder.resolve().name if os.path.isdir(folder) else model  # Path's own raises where a name is long


def locate(model: str, revision: str | None = None, *, with_code: bool = False) -> LocatedPackage:
    """Find a package: `model` itself when it is a folder, else its files from the Hub or the local cache.

    Downloads resume where they broke off and show a progress bar; HF_HUB_OFFLINE=1 takes the cache alone.

    Args:
        model: local folder or Hub id.
        revision: branch, tag or commit; None means the one that the registry pins.
        with_code: fetch the package's prompt renderer too.

    Raises:
        InvalidCheckpoint: neither a folder nor a repository that can be read; the message says what to do.
    """
    folder = Path(os.path.expanduser(model))
    if os.path.isdir(folder):
        return LocatedPackage(folder, served_name(model), revision)
    if model.startswith((".", "/", "~")):
        raise InvalidCheckpoint(f"{model} is no folder on this machine", field="model")
    published = find(model)
    if published and published.refusal and not (with_code and published.refusal == NO_PUBLIC_LAYOUT):
        raise InvalidCheckpoint(f"{model}: {published.refusal}", field="model")
    if constants.HF_HUB_CACHE.startswith("~"):
        raise InvalidCheckpoint(f"{model}: no home folder to keep downloads in; set HF_HOME", field="model")
    wanted = revision or (published.revision if published else None)
    patterns = [*NEEDED_FILES, *(CODE_FILES if with_code else ())]
    try:
        commit = _commit(model, wanted)
        found = Path(snapshot_download(model, revision=commit, allow_patterns=patterns))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        httpx.HTTPError,
        OSError,
    ) as error:
        raise _refusal(model, wanted, error) from None
    return LocatedPackage(found, model, found.name if COMMIT.fullmatch(found.name) else commit, True)


def _digest_file(digest: "hashlib._Hash", path: Path) -> None:
    """Take a file's bytes into `digest`; of a large one its size, its time and pieces all over it."""
    stat = path.stat()
    digest.update(f"{path.name}\0{stat.st_size}\0".encode())
    with path.open("rb") as file:
        if stat.st_size <= WHOLE_BYTES:
            digest.update(file.read())
            return
        digest.update(f"{stat.st_mtime_ns}\0".encode())
        for piece in range(SAMPLES):
            file.seek(piece * (stat.st_size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))


def _commit(model: str, wanted: str | None) -> str | None:
    """Complete an abbreviated commit: from the local cache, else from the repository's history."""
    if wanted is None or not re.fullmatch(r"[0-9a-f]{7,39}", wanted):
        return wanted
    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "snapshots"
    cached = [name for name in os.listdir(snapshots) if name.startswith(wanted)] if snapshots.is_dir() else []
    if cached:
        return cached[0]
    for commit in HfApi().list_repo_commits(model):
        if commit.commit_id.startswith(wanted):
            return commit.commit_id
    raise InvalidCheckpoint(
        f"{model} has no commit {wanted} in its history; pass --revision with one that it has",
        field="revision",
    )


def _refusal(model: str, wanted: str | None, error: Exception) -> InvalidCheckpoint:
    page = f"https://huggingface.co/{model}"
    if isinstance(error, GatedRepoError):
        advice = f"access is restricted: accept its terms at {page}, then set HF_TOKEN"
    elif isinstance(error, RevisionNotFoundError):
        advice = f"it has no revision {wanted}; pass --revision with one of {page}/commits/main"
    elif isinstance(error, RepositoryNotFoundError):
        advice = f"there is no such repository, or it is private: check {page}, or set HF_TOKEN"
    elif isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled | httpx.TransportError):
        advice = "it is not in the local cache and the Hub cannot be reached: check its name and the network"
    else:
        advice = f"it cannot be downloaded: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    return InvalidCheckpoint(f"{model}: {advice}", field="model")
