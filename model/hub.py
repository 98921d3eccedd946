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
DESCRIPTIONS = (
    "MODEL_MANIFEST.json",
    "decision_config.json",
    "config.json",
    "model.safetensors.index.json",
)
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Package:
    """A package on this machine, under the name that clients ask for."""

    folder: Path
    name: str
    revision: str | None

    @property
    def identity(self) -> str:
        """What tells this checkpoint from others: its revision, or a digest of the package's descriptions."""
        if self.revision:
            return self.revision
        digest = hashlib.sha256()
        for name in DESCRIPTIONS:
            if (self.folder / name).is_file():
                digest.update((self.folder / name).read_bytes())
        return digest.hexdigest()


def locate(model: str, revision: str | None = None, *, with_code: bool = False) -> Package:
    """Find a package: `model` itself when it is a folder, else its files from the Hub or the local cache.

    Downloads resume where they broke off and show a progress bar; HF_HUB_OFFLINE=1 takes the cache alone.

    Args:
        model: local folder or Hub id.
        revision: branch, tag or commit; None means the one that the registry pins.
        with_code: fetch the package's prompt renderer too.

    Raises:
        InvalidCheckpoint: neither a folder nor a repository that can be read; the message says what to do.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return Package(folder, folder.resolve().name, revision)
    if model.startswith((".", "/", "~")):
        raise InvalidCheckpoint(f"{model} is no folder on this machine", field="model")
    published = find(model)
    if published and published.refusal and not (with_code and published.refusal == NO_PUBLIC_LAYOUT):
        raise InvalidCheckpoint(f"{model}: {published.refusal}", field="model")
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
    return Package(found, model, found.name if COMMIT.fullmatch(found.name) else commit)


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
        advice = "it is not in the local cache and the Hub cannot be reached; run `d3serve pull` while online"
    else:
        advice = f"it cannot be downloaded: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    return InvalidCheckpoint(f"{model}: {advice}", field="model")
