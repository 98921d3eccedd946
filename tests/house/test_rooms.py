"""The rooms of the house and the arrows of imports between them: few, and all of them lead down.

A room is a folder or a loose file of `d3serve/`, and each of the four folders beside it.
"""

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = ("api", "worker", "model", "kernels")
# evaluation and its four: to errors, schemas and text, and from the commands. tracing and its three: one trace leads
# through API, worker and webhook sender.
MOST_ROOMS, MOST_ARROWS = 21, 75

# From the ground up: a room may import from those on lower floors that its row names, and from no other.
FLOORS: tuple[dict[str, set[str]], ...] = (
    {"": set(), "errors": set(), "kernels": set(), "tracing": set()},  # "": the version, in d3serve/__init__.py
    {"text": {"errors"}, "media": {"errors"}},
    {"schemas": {"text"}, "settings": {"errors", "text"}},
    {
        "evaluation": {"errors", "schemas", "text"},
        "logs": {"settings"},
        "api_keys": {"errors", "schemas", "settings", "text"},
        "model": {"errors", "kernels", "schemas"},
    },
    {"store": {"errors", "media", "schemas", "settings"}},
    {
        "wake": {"errors", "schemas", "settings", "store"},
        "webhooks": {"errors", "logs", "schemas", "settings", "store", "tracing"},
        "up": {"api_keys", "errors", "logs", "settings", "store"},
    },
    {
        "client": {"errors", "text", "webhooks"},
        "worker": {"errors", "logs", "media", "model", "schemas", "settings", "store", "tracing", "wake"},
        "api": {
            "", "api_keys", "errors", "logs", "media", "schemas", "settings", "store", "text", "tracing", "wake",
            "webhooks",
        },
    },
    {
        "commands": {
            "", "api", "api_keys", "client", "errors", "evaluation", "logs", "model", "schemas", "settings", "store",
            "text", "up", "webhooks", "worker",
        },
    },
    {"__main__": {"commands"}},
)  # fmt: skip
LAW = {room: below for floor in FLOORS for room, below in floor.items()}
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}


def modules(root: Path) -> dict[str, Path]:
    """Each module of ours by its dotted name; links are walked once, where they lead."""
    found = {}
    for folder in ("d3serve", *BESIDE):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if folder != "d3serve" or parts[1] not in BESIDE:
                name = parts if folder == "d3serve" else ("d3serve", *parts)
                found[".".join(name).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: Iterable[str]) -> set[str]:
    """The modules of ours that a file imports anywhere: at its top, in a function or for types alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in known else node.module for name in whole}
    return names.intersection(known)


def room_of(module: str) -> str:
    """The room of a module."""
    return module.partition(".")[2].partition(".")[0]


@functools.cache
def arrows(root: Path) -> dict[str, set[str]]:
    """For each room, those that it imports from."""
    files = modules(root)
    found: dict[str, set[str]] = {room_of(name): set() for name in files}
    for name, path in files.items():
        found[room_of(name)] |= {room_of(other) for other in imported(path, files)} - {room_of(name)}
    return found


def test_there_are_few_rooms_and_few_arrows_between_them() -> None:
    graph = arrows(ROOT)
    assert {"store", "model", "errors"} <= graph["worker"], "no imports found: the walk is broken"
    assert len(graph) <= MOST_ROOMS, sorted(graph)
    assert sum(map(len, graph.values())) <= MOST_ARROWS, graph


def test_every_room_has_its_row_and_every_row_its_room() -> None:
    assert set(LAW) == set(arrows(ROOT))


@pytest.mark.parametrize("room", LAW)
def test_a_room_imports_only_what_its_row_names(room: str) -> None:
    assert arrows(ROOT)[room] - LAW[room] == set()


@pytest.mark.parametrize("room", LAW)
def test_a_row_names_only_rooms_on_lower_floors(room: str) -> None:
    assert {below for below in LAW[room] if FLOOR[below] >= FLOOR[room]} == set()


def test_the_way_of_a_webhook_leads_down_all_the_way() -> None:
    """What the sender's process can reach lies below it, so no step of a delivery is back up in another room."""
    files = modules(ROOT)
    way, seen = ["d3serve.webhooks.main"], set()
    while way:
        module = way.pop()
        seen.add(module)
        way += imported(files[module], files) - seen
    assert {"d3serve.webhooks.sender", "d3serve.webhooks.outbox", "d3serve.store.connect"} <= seen
    assert {room_of(module) for module in seen} - LAW["webhooks"] <= {"webhooks", "text"}


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("d3serve/store/a.py", "from d3serve.wake.celery_app import Waker", ("store", "wake")),
        ("kernels/a.py", "def f():\n    import d3serve.errors", ("kernels", "errors")),
        ("d3serve/a.py", "from d3serve.api.app import create_app", ("a", "api")),
    ],
)
def test_an_arrow_that_leads_up_is_seen(
    tmp_path: Path, file: str, line: str, broken: tuple[str, str]
) -> None:
    for name in ("d3serve/wake/celery_app.py", "d3serve/errors.py", "api/app.py", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(line if name == file else "")
    assert broken[1] in arrows(tmp_path)[broken[0]] - LAW.get(broken[0], set())
