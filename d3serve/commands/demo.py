"""`d3serve demo`: one real job about a package that the bundled checkpoint never met in training."""

from typing import Any, Final

import typer

from d3serve.commands.ask import post, show_table
from d3serve.commands.options import DataDir, Model
from d3serve.commands.preflight import CHECKS, preflight
from d3serve.commands.surroundings import leave_start_folder
from d3serve.commands.terminal import messages
from d3serve.settings import BUNDLED, Settings
from d3serve.up.local import running

# Debian 12's package openntpd, in its maintainers' words; the truths are its section and debtags.
REQUEST: Final[dict[str, Any]] = {
    "state": {
        "summary": "OpenBSD NTP daemon",
        "description": (
            "NTP, the Network Time Protocol, is used to keep the computer clocks synchronized. It provides the "
            "ability to sync the local clock to remote NTP servers and can act as NTP server itself, "
            "redistributing the local clock."
        ),
    },
    "questions": {
        "section": {
            "type": "choice",
            "instructions": "Which section does the package belong to?",
            "criteria": {
                "games": None,
                "network tools": None,
                "libraries": None,
                "science": None,
                "text editors": None,
                "fonts": None,
            },
        },
        "needs a network": {"type": "noul", "instructions": "Does the package need a network?"},
        "is a game": {"type": "noul", "instructions": "Is the package a game?"},
        "role": {
            "type": "choice",
            "instructions": "Which role does the package play?",
            "criteria": {"a program to run": None, "a shared library": None, "documentation": None},
        },
        "dependencies": {
            "type": "score",
            "instructions": "How many other packages does it need?",
            "criteria": ["none", "1 or 2", "3 to 6", "7 to 14", "15 or more"],
        },
    },
}
TRUTHS: Final[dict[str, str]] = {
    "section": "network tools",
    "needs a network": "yes",
    "is a game": "no",
    "role": "a program to run",
    "dependencies": "3 to 6",
}


def demo(model: Model = None, data_dir: DataDir = None) -> None:
    """Start everything on a free port, post one real job over HTTP, print its answers and stop."""
    settings = Settings.load(model=model or BUNDLED, data_dir=data_dir, port=0, log_level="warning")
    leave_start_folder()
    preflight(settings, CHECKS)
    console = messages()
    with running(settings) as (_, url):
        console.print(f"broker, API and worker are up at [bold]{url}[/bold]; POST {url}/v1/jobs:")
        console.print_json(data=REQUEST)
        job = post(url, REQUEST, api_key=None, console=console)
        raise typer.Exit(0 if show_table(job, TRUTHS) else 1)
