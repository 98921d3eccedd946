"""What a process that stays does not take from the place it was started in: modules, and a folder that may go."""

import os
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

from d3serve.settings import METRICS_FOLDER

SAFE_FOLDER: Final = "/"  # always there, and nobody keeps a celery.py in it
# Paths that libraries below us read from the environment, when they get to it.
LIBRARY_PATHS: Final = (
    "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "SSL_CERT_FILE", "TMPDIR",
    METRICS_FOLDER,
)  # fmt: skip
LISTS_OF_PATHS: Final = ("PYTHONPATH", "SSL_CERT_DIR")


def tidy_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make the paths in variables of libraries absolute, and drop those that are empty.

    To the libraries an empty one is the current folder: downloads would go to `./hub`, counters to `./*.db`. So is an
    empty part of PYTHONPATH, which nobody means who writes `$PYTHONPATH:more`.
    """
    for name in (*LIBRARY_PATHS, *LISTS_OF_PATHS):
        given = environment.get(name, "")
        parts = given.split(os.pathsep) if name in LISTS_OF_PATHS else [given]
        with suppress(FileNotFoundError):  # the current folder is gone: relative paths lead nowhere
            whole = os.pathsep.join(
                part if part[0] == "~" else os.path.abspath(part) for part in parts if part
            )
            if whole:
                environment[name] = whole
            else:
                environment.pop(name, None)


def leave_start_folder() -> None:
    """Stand in `/` from now on, and let no child import from the folder it is started in.

    Celery puts the current folder on the import path while it loads a worker, and fails to replace a child once the
    folder is gone; a celery.py, json.py or torch.py of the user's project would be imported instead of the library.
    The settings have made their own paths absolute by now, `tidy_environment` those of libraries.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    os.chdir(SAFE_FOLDER)
