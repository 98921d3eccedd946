"""`d3serve demo`: real jobs about a package and a drawing that the bundled checkpoint never met in training."""

from importlib.util import find_spec
from typing import Any, Final

import httpx
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

# Two blue squares on grey: a shape and a colour that were never drawn together for training.
PICTURE: Final = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAQAAAAEABAMAAACuXLVVAAAAMFBMVEXGzsrFzcnEzMjDy8fCysbBycXAyMS/x8O+xsK8xMC7"
    "w7+6wr65wb24wLy3v7tpjqyr6Bz2AAABZUlEQVR42u3cPU4CURQF4IMBbKFjWVTWuAM7dQdjZ01lrRYsy5LWn2QsiJVAYiBc"
    "mflO+UImX+bdx5mhIBERERERkeIMpsWAiwAAAAAAAPQdMFTHAAAAAAAA6tgMAAAAAACoY3UMAAAAAACgjs0AAAAAAIA6VscA"
    "AAAAAADq2AzsWL852QzsWJ81Sdr7OkCSZNAkyV0dYJMmSd4ei4dw1jSOYb8Al9WAgRmoruMtM/A+tQUAAKcELKoBEzPwO+tq"
    "wNO5bMH46E/Fe3K7bfGhq2/Hx/+gr+I9gHHv78B/BLTVgE8z0Nk3o62rH8tcTSoBSZ6TZLyoA/zciWR0XQfYHMBlksyrh3Dl"
    "GJ4PYH5CwPrwt6rDACszAAAA0IVHsoN+gh5tW/zbH33ZAgAAgOERr9W+nhzQvhRvwZch7H0d2wIAAAAAAAB1DAAAAAAAoI5t"
    "AQAAAAAAgDoGAAAAAAAAAAAA6ALgG8FtHeFvz4LhAAAAAElFTkSuQmCC"
)
DRAWING: Final[dict[str, Any]] = {
    "state": "A drawing",
    "images": [PICTURE],
    "questions": {
        "colour": {
            "type": "choice",
            "instructions": "Which colour is it?",
            "criteria": dict.fromkeys(("red", "blue", "green", "yellow")),
        },
        "shape": {
            "type": "choice",
            "instructions": "Which shape is it?",
            "criteria": dict.fromkeys(("circle", "star", "square", "triangle")),
        },
        "count": {
            "type": "choice",
            "instructions": "How many are there?",
            "criteria": dict.fromkeys(("one", "two", "three", "four")),
        },
    },
}
DRAWN: Final[dict[str, str]] = {"colour": "blue", "shape": "square", "count": "two"}
DECODERS: Final = ("PIL", "av")  # what the extra `media` brings


def demo(model: Model = None, data_dir: DataDir = None) -> None:
    """Start everything on a free port, post real jobs over HTTP, print their answers and stop."""
    settings = Settings.load(model=model or BUNDLED, data_dir=data_dir, port=0, log_level="warning")
    leave_start_folder()
    preflight(settings, CHECKS)
    console = messages()
    with running(settings) as (_, url):
        console.print(f"broker, API and worker are up at [bold]{url}[/bold]; POST {url}/v1/jobs:")
        console.print_json(data=REQUEST)
        succeeded = show_table(post(url, REQUEST, api_key=None, console=console), TRUTHS)
        if _looks(url):
            shown = DRAWING | {"images": [f"{PICTURE[:40]}… {len(PICTURE)} characters"]}
            console.print("and a drawing of two blue squares:")
            console.print_json(data=shown)
            succeeded &= show_table(post(url, DRAWING, api_key=None, console=console), DRAWN)
        raise typer.Exit(0 if succeeded else 1)


def _looks(url: str) -> bool:
    """Whether the model reads images, and this host can decode them."""
    [model] = httpx.get(f"{url}/v1/models", trust_env=False).json()["models"]
    return "image" in model["modalities"] and all(map(find_spec, DECODERS))
