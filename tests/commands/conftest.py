"""Fixtures of a served API, from tests/service.py, and files of requests."""

import json

import pytest
from service import counter, service, serving, settings, take_turns, worker
from submissions import NOUL

__all__ = ["counter", "service", "serving", "settings", "take_turns", "worker"]


@pytest.fixture
def files(tmp_path):
    requests, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    lines = [{"state": f"state {i}", "questions": {"q": NOUL}} for i in range(12)]
    lines[3]["questions"] = {}
    requests.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return requests, out


@pytest.fixture
def good(files):
    """The same with nothing wrong in it."""
    files[0].write_text("".join(files[0].read_text().splitlines(keepends=True)[:3]))
    return files
