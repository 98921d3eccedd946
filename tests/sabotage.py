"""Runs a test again on a script that lacks a line: it must fail then. For the conftest.py of each folder that does."""

import pytest

from d3serve.store import lua


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "sabotage(script, old, new): run the test again on a broken script; it must fail then"
    )


def pytest_generate_tests(metafunc):
    """A guarantee that holds without the line that gives it is no guarantee, or the test is no test."""
    cuts = [mark.args for mark in metafunc.definition.iter_markers("sabotage")]
    for name, old, _ in cuts:  # here, where a failure is not what the test waits for
        if old not in lua.script(name):
            pytest.fail(f"{metafunc.definition.nodeid}: the line to break has moved: {old}", pytrace=False)
    if cuts:
        broken = [
            pytest.param(cut, id=f"sabotaged-{cut[0]}", marks=pytest.mark.xfail(strict=True)) for cut in cuts
        ]
        metafunc.parametrize("sabotage", [pytest.param(None, id="whole"), *broken], indirect=True)


@pytest.fixture
def sabotage(request, monkeypatch):
    """Replace a line of one script, for the tests that are marked so."""
    cut = getattr(request, "param", None)
    if cut is None:
        return
    name, old, new = cut
    whole = lua.script(name)
    broken = whole.replace(old, new)
    original = lua.script
    monkeypatch.setattr(lua, "script", lambda asked: broken if asked == name else original(asked))
