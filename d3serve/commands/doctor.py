"""`d3serve doctor`: everything that is checked before a start, and the versions that a bug report needs, as a table."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import httpx
import typer
from rich.table import Table

from d3serve import __version__
from d3serve.api_keys import make_key_ring
from d3serve.commands.options import DataDir, Device, Host, Model, Port, RedisUrl, Workers
from d3serve.commands.preflight import CHECKS, Found, look
from d3serve.commands.terminal import plain, printing
from d3serve.errors import BrokerUnavailable, InvalidSettings, StartupError
from d3serve.settings import Settings
from d3serve.store.connect import check_server
from d3serve.up.broker import find_server, local_url
from d3serve.up.devices import NoGPU, driver_cuda, torch_build
from d3serve.up.supervisor import bind

ANSWER_S: Final = 1.0
PACKAGES: Final = ("torch", "triton", "transformers", "celery", "kombu", "redis", "fastapi", "uvicorn")
SHOWN: Final = {True: "[green]ok[/green]", None: "[yellow]note[/yellow]", False: "[red]fails[/red]"}


def doctor(
    model: Model = None,
    device: Device = None,
    workers: Workers = None,
    redis_url: RedisUrl = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
) -> None:
    """Check what `d3serve up` needs with these settings, and print versions; exit with 1 if anything fails."""
    try:
        settings = Settings.load(
            model=model,
            device=device,
            workers=workers,
            redis_url=redis_url,
            host=host,
            port=port,
            data_dir=data_dir,
        )
    except InvalidSettings as error:
        found = {"settings": Found(error.message, good=False)}
    else:
        found = {"settings": Found("are read and understood")}
        found |= {check.__name__: look(check, settings) for check in (*CHECKS, broker, keys, address)}
    table = Table("check", "", "found", box=None, pad_edge=False)
    for name, (words, good) in found.items():
        table.add_row(name, SHOWN[good], plain(words))
    for name, words in versions().items():
        table.add_row(name, "", plain(words), style="dim")
    with printing() as screen:
        screen.print(table)
    raise typer.Exit(1 if any(each.good is False for each in found.values()) else 0)


def broker(settings: Settings) -> Found:
    """The server of the settings, or the one in the data folder, or that which would be started there."""
    if settings.redis_url is not None:
        return Found(check_server(settings, patience_s=0))
    try:
        running = settings.model_copy(update={"redis_url": local_url(settings)})
        return Found(f"{check_server(running, patience_s=0)}, which `d3serve up` has started")
    except BrokerUnavailable:
        return Found(f"to be started: {find_server()}")


def keys(settings: Settings) -> Found:
    """The API keys, which an address beyond this host needs."""
    return Found("are read" if make_key_ring(settings) else "none are asked for")


def address(settings: Settings) -> Found:
    """A free port, or one that a d3serve of before holds."""
    try:
        bind(settings.host, settings.port).close()
    except StartupError:
        if not _is_ours(f"http://{settings.host}:{settings.port}"):
            raise
        return Found(f"d3serve answers on {settings.host}:{settings.port}", good=None)
    return Found(f"{settings.host}:{settings.port} is free")


def _is_ours(url: str) -> bool:
    with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
        try:
            answer = client.get(f"{url}/healthz")
        except (httpx.HTTPError, httpx.InvalidURL):
            return False
    return answer.is_success and "x-request-id" in answer.headers


def versions() -> dict[str, str]:
    """What a bug report needs to say."""
    told = {"d3serve": __version__, "Python": f"{sys.version.split()[0]}, {platform.platform()}"}
    for name in PACKAGES:
        try:
            told[name] = version(name)
        except PackageNotFoundError:
            told[name] = "not installed"
    told["torch"] += f", built for {torch_build()}"
    try:
        told["NVIDIA driver"] = f"for CUDA up to {driver_cuda()}"
    except NoGPU as error:
        told["NVIDIA driver"] = str(error)
    return told
