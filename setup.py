"""Refuse to build half a package; everything else that setuptools needs stands in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

PACKAGE = Path(__file__).parent / "d3serve"

# Relative links to folders at the root. Zip files, and git on Windows by default, make small text files of them.
if broken := sorted(
    f"d3serve/{path.name}" for path in PACKAGE.iterdir() if path.is_file() and not path.suffix
):
    sys.exit(
        f"error: {', '.join(broken)}: links became plain files, so most of d3serve is missing. Install from a git clone"
        " (on Windows: git config core.symlinks true) or a source distribution, not from a zip of the repository."
    )
setup()
