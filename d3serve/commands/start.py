"""`d3serve up`, `api`, `worker`, `webhooks` and `batches`: the processes of an installation, all at once or one."""

import socket
from typing import Annotated, Any

import typer

from d3serve.commands.options import (
    DataDir,
    Device,
    Dtype,
    ExitWithParent,
    Host,
    Lanes,
    Model,
    Port,
    Quantization,
    RedisUrl,
    Revision,
    TrustRemoteCode,
    Workers,
)
from d3serve.commands.preflight import CHECKS, OF_A_WORKER, preflight
from d3serve.commands.surroundings import leave_start_folder
from d3serve.commands.terminal import messages, tell_error
from d3serve.settings import Settings
from d3serve.store.connect import check_server, server_of
from d3serve.up import supervisor
from d3serve.up.local import run_apis, running


def up(
    model: Model = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    workers: Workers = None,
    quantization: Quantization = None,
    trust_remote_code: TrustRemoteCode = None,
    redis_url: RedisUrl = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
) -> None:
    """Run broker (unless --redis-url is given), API, workers, webhook sender and batch feeder in one process tree."""
    settings = _settings(locals())
    leave_start_folder()
    preflight(settings, CHECKS)
    with running(settings) as (tree, url):
        messages().print(f"d3serve is ready: [bold]{url}[/bold]")
        tree.run()


def api(
    redis_url: RedisUrl = None,
    host: Host = None,
    port: Port = None,
    model: Model = None,
    processes: Annotated[int | None, typer.Option(help="Number of processes sharing the port.")] = None,
    fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Run only the HTTP API."""
    settings = Settings.load(redis_url=redis_url, host=host, port=port, model=model, api_processes=processes)
    server_of(settings)
    leave_start_folder()
    if fd is None:
        # One that is away is waited for, as when it goes later.
        check_server(settings, patience_s=0, may_be_away=True)
    if fd is None and settings.api_processes > 1:
        run_apis(settings)
        return
    from d3serve.api.main import api_main

    if exit_with_parent:
        supervisor.exit_with_parent(settings.stop_grace_s + supervisor.LEAVE_S)

    def listen() -> socket.socket:
        # As a socket, not `fd=`: uvicorn takes a descriptor for a unix one, and without TCP_NODELAY answers wait 40 ms.
        return supervisor.bind(settings.host, settings.port) if fd is None else socket.socket(fileno=fd)

    api_main(settings, listen)


def worker(
    model: Model = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    trust_remote_code: TrustRemoteCode = None,
    lanes: Lanes = None,
    redis_url: RedisUrl = None,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Run one worker: load the model, then process jobs until stopped."""
    settings = _settings(locals(), leave_out=("exit_with_parent",))
    server_of(settings)
    leave_start_folder()
    if exit_with_parent:
        supervisor.exit_with_parent(settings.stop_grace_s + supervisor.LEAVE_S)  # who has looked already
    else:
        preflight(settings, OF_A_WORKER)
    from d3serve.worker.main import worker_main

    raise typer.Exit(worker_main(settings, tell_why=_say_why))


def _say_why(reason: str) -> None:
    if not supervisor.tell_parent(reason):
        tell_error(reason)


def webhooks(redis_url: RedisUrl = None, exit_with_parent: ExitWithParent = False) -> None:
    """Run the webhook sender: deliver the events of finished jobs, with retries."""
    settings = _settings(locals(), leave_out=("exit_with_parent",))
    leave_start_folder()
    from d3serve.webhooks.main import webhooks_main

    if exit_with_parent:
        supervisor.exit_with_parent(settings.stop_grace_s + supervisor.LEAVE_S)
    raise typer.Exit(webhooks_main(settings))


def batches(
    redis_url: RedisUrl = None, model: Model = None, exit_with_parent: ExitWithParent = False
) -> None:
    """Run the feeder of batches: make jobs of their lines, and files of the answers."""
    settings = _settings(locals(), leave_out=("exit_with_parent",))
    leave_start_folder()
    from d3serve.api.batch_main import batches_main

    if exit_with_parent:
        supervisor.exit_with_parent(settings.stop_grace_s + supervisor.LEAVE_S)
    raise typer.Exit(batches_main(settings))


def _settings(flags: dict[str, Any], leave_out: tuple[str, ...] = ()) -> Settings:
    return Settings.load(**{name: value for name, value in flags.items() if name not in leave_out})
