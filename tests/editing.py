"""Changing a package's JSON files, for tests of what a loader makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit(package: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` alter the object that a file of the package holds."""
    values = json.loads((package / name).read_text())
    change(values)
    (package / name).write_text(json.dumps(values))
