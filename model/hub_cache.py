"""Where downloaded packages are kept, and whether one is there; the Hub's client itself is not loaded for it."""

from pathlib import Path

from huggingface_hub import constants


def cache_folder() -> Path:
    """The folder of all downloads."""
    return Path(constants.HF_HUB_CACHE).expanduser()


def is_cached(model: str) -> bool:
    """Whether weights of a repository are there, of any revision; perhaps not all of them."""
    return any(cache_folder().glob(f"models--{model.replace('/', '--')}/snapshots/*/*.safetensors"))


def may_download() -> bool:
    """Whether the Hub may be asked at all."""
    return not constants.HF_HUB_OFFLINE
