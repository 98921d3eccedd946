"""The `d3serve` command. Rooms are imported inside the command that needs them: `ask` never loads torch."""

import sys
from typing import Annotated, NoReturn

import typer

from d3serve import __version__
from d3serve.commands.ask import ask
from d3serve.commands.checkpoints import check, models, pull
from d3serve.commands.demo import demo
from d3serve.commands.descriptors import raise_descriptor_limit
from d3serve.commands.doctor import doctor
from d3serve.commands.evaluate import evaluate
from d3serve.commands.extras import explained
from d3serve.commands.new_key import new_key
from d3serve.commands.operate import operate
from d3serve.commands.start import api, batches, up, webhooks, worker
from d3serve.commands.submit import submit
from d3serve.commands.surroundings import tidy_environment
from d3serve.commands.terminal import degrade, printing, tell_error
from d3serve.errors import D3ServeError
from d3serve.logs import write_or_lose
from d3serve.up import supervisor

app = typer.Typer(
    name="d3serve",
    help="Serve decision models: post a state and typed questions, get answers with probabilities.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

for command in (
    up,
    api,
    worker,
    webhooks,
    batches,
    new_key,
    ask,
    submit,
    evaluate,
    models,
    pull,
    check,
    demo,
    doctor,
):
    app.command()(command)
app.add_typer(operate, name="jobs")


def _print_version(wanted: bool) -> None:
    if wanted:
        with printing() as screen:
            screen.print(f"d3serve {__version__}")
        raise typer.Exit


@app.callback()
def _everywhere(
    _version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; an error of our own is one line on standard error, never a traceback."""
    degrade()
    raise_descriptor_limit()
    write_or_lose()
    tidy_environment()
    try:
        app()
    except D3ServeError as error:
        _end(error)
    except ModuleNotFoundError as error:
        if (lacking := explained(error)) is None:
            raise
        _end(lacking)


def _end(error: D3ServeError) -> NoReturn:
    if not supervisor.tell_parent(error.message):
        tell_error(error.message)
    sys.exit(2)
