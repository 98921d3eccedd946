"""What only the fault tests need."""

import itertools

import pytest


@pytest.fixture
def broken_site(tmp_path):
    """An environment in which every Python process of a worker runs some code first, spawned ones too."""
    count = itertools.count()

    def environ(code):
        folder = tmp_path / f"site-{next(count)}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(code)
        return {"PYTHONPATH": str(folder)}

    return environ
