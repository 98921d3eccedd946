"""Where downloaded packages are kept, and whether one is there; the Hub's client itself is not loaded for it."""

from pathlib import Path

from huggingface_hub import constants

from d3serve.errors import InvalidSettings


def cache_folder() -> Path:
    """The folder of all downloads.

    Raises:
        InvalidSettings: this user has no home folder, and no other one is set.
    """
    try:
        return Path(constants.HF_HUB_CACHE).expanduser()
    except RuntimeError:
        raise InvalidSettings("no home folder for downloads from the Hub: choose one with HF_HOME") from None


def is_cached(model: str) -> bool:
    """Whether weights of a repository are there, of any revision; perhaps not all of them."""
    return any(cache_folder().glob(f"models--{model.replace('/', '--')}/snapshots/*/*.safetensors"))


def may_download() -> bool:
    """Whether the Hub may be asked at all."""
    return not constants.HF_HUB_OFFLINE
