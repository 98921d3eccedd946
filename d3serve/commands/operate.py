"""`d3serve jobs`: for operators, on Redis directly."""

from typing import Annotated

import typer
from rich.table import Table

from d3serve.commands.terminal import printing
from d3serve.settings import Settings
from d3serve.store.connect import check_server
from d3serve.store.operate import Operator
from d3serve.up.broker import local_url

operate = typer.Typer(
    no_args_is_help=True, help="For operators: see and take out what tenants have in the job table."
)

RedisUrl = Annotated[
    str | None, typer.Option(help="URL of the Redis-protocol server. If unset, the one that `up` started.")
]
DataDir = Annotated[str | None, typer.Option(metavar="PATH", help="Folder of the embedded broker's data.")]


@operate.command("list")
def list_tenants(redis_url: RedisUrl = None, data_dir: DataDir = None) -> None:
    """List tenants: their jobs, those that wait, and the bytes kept for them."""
    table = Table("tenant", "jobs", "waiting", "waiting tokens", "kept bytes", box=None, pad_edge=False)
    for use in _operator(redis_url, data_dir).tenants():
        numbers = (use.jobs, use.waiting_jobs, use.waiting_tokens, use.kept_bytes)
        table.add_row(use.tenant, *(f"{number:,}" for number in numbers))
    with printing() as screen:
        screen.print(table)


@operate.command("purge")
def purge_tenant(
    tenant: Annotated[str, typer.Argument(help="Whose jobs to erase.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Cancel and erase all jobs, batches and files of a tenant: inputs, results, and what webhooks have to deliver."""
    operator = _operator(redis_url, data_dir)
    if not yes:
        typer.confirm(f"Erase all jobs, batches and files of {tenant}?", abort=True)
    erased = operator.purge(tenant)
    typer.echo(
        f"{erased.jobs:,} jobs, {erased.batches:,} batches and {erased.files:,} files of {tenant} erased"
    )


def _operator(redis_url: str | None, data_dir: str | None) -> Operator:
    """Of the server that is named, else of the one that `up` started in the data folder."""
    settings = Settings.load(redis_url=redis_url, data_dir=data_dir)
    if settings.redis_url is None:
        settings = settings.model_copy(update={"redis_url": local_url(settings)})
    check_server(settings)
    return Operator.open(settings)
