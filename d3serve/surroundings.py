"""What a process that stays does not take from the place it was started in: modules, and a folder that may go."""

import os
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

from d3serve.settings import METRICS_FOLDER

SAFE_FOLDER: Final = "/"  # always there, and nobody keeps a celery.py in it
# Paths that libraries below us read from the environment, when they get to it.
LIBRARY_PATHS: Final = (
    "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "TMPDIR", METRICS_FOLDER,
)  # fmt: skip


def leave_start_folder() -> None:
    """Stand in `/` from now on, and let no child import from the folder it is started in.

    Celery puts the current folder on the import path while it loads a worker, and fails to replace a child once the
    folder is gone; a celery.py, json.py or torch.py of the user's project would be imported instead of the library.
    The settings have made their own paths absolute by now.
    """
    with suppress(FileNotFoundError):  # gone already: relative paths lead nowhere
        _make_absolute(os.environ)
    os.environ["PYTHONSAFEPATH"] = "1"
    os.chdir(SAFE_FOLDER)


def _make_absolute(environment: MutableMapping[str, str]) -> None:
    for name in LIBRARY_PATHS:
        if environment.get(name):
            environment[name] = os.path.abspath(os.path.expanduser(environment[name]))
    if "PYTHONPATH" in environment:  # an empty part of it means the current folder
        parts = [os.path.abspath(part) for part in environment["PYTHONPATH"].split(os.pathsep) if part]
        environment["PYTHONPATH"] = os.pathsep.join(parts)
