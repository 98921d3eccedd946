"""The law of the house: who may import whom, what a wheel holds, that words and errors stay in step."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import write_settings_doc

ROOT = Path(__file__).parents[2]
ROOMS = ("api", "worker", "model", "kernels")

# room -> what of ours it may import, and which third-party packages it must never import
LAW: dict[str, tuple[set[str], set[str]]] = {
    "d3serve": ({"d3serve"}, {"torch", "transformers", "triton", "fla", "fastapi"}),
    "api": ({"d3serve", "api"}, {"torch", "transformers", "triton", "fla", "safetensors"}),
    "worker": ({"d3serve", "worker", "model"}, {"fastapi", "starlette", "triton", "fla"}),
    "model": ({"d3serve", "model", "kernels"}, {"redis", "celery", "fastapi"}),
    "kernels": ({"kernels"}, {"transformers", "redis", "celery", "fastapi", "pydantic"}),
}
SHARED_FOR_MODEL = {"d3serve.errors", "d3serve.schemas"}
# the command line imports a room inside the command that needs it
LAZY_CLI = {f"d3serve/commands/{name}.py" for name in ("start", "checkpoints", "preflight")}


def sources(room: str) -> list[Path]:
    folder = ROOT / room
    return [p for p in sorted(folder.rglob("*.py")) if not any(part.is_symlink() for part in [p, *p.parents])]


def room_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "d3serve":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "d3serve"


def imports(path: Path, *, top_level_only: bool = False) -> list[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def breaches(room: str) -> list[str]:
    allowed, banned = LAW[room]
    found = []
    for path in sources(room):
        name = str(path.relative_to(ROOT))
        for module in imports(path, top_level_only=name in LAZY_CLI):
            ours = room_of(module)
            if ours is not None and ours not in allowed:
                found.append(f"{name} imports {module}")
            if module.split(".")[0] in banned:
                found.append(f"{name} imports {module}")
            shared = ".".join(module.split(".")[:2])
            if (
                room == "model"
                and ours == "d3serve"
                and shared not in SHARED_FOR_MODEL | {"d3serve.__version__"}
            ):
                found.append(f"{name} imports {module}")
    return found


@pytest.mark.parametrize("room", LAW)
def test_import_law(room: str) -> None:
    assert sources(room), f"no sources found in {room}: the walk is broken"
    assert breaches(room) == []


def test_import_law_sees_a_breach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "bad.py").write_text("from d3serve.errors import D3ServeError\nimport redis\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert len(breaches("kernels")) == 2


def import_graph() -> dict[str, set[str]]:
    """Each module of ours, and those that it imports anywhere: at the top, in a function or for types alone."""
    files = {}
    for room in LAW:
        for path in sources(room):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            files[name if room == "d3serve" else f"d3serve.{name}"] = path
    return {
        name: {
            module if module in files else module.rpartition(".")[0] for module in imports(path)
        }.intersection(files)
        - {name}
        for name, path in files.items()
    }


def test_no_module_leads_back_to_itself() -> None:
    graph = import_graph()
    assert "d3serve.errors" in graph["d3serve.model.engine"], "no imports found: the walk is broken"
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_rooms_are_namespace_packages_mounted_by_relative_links() -> None:
    for room in ROOMS:
        assert not (ROOT / room / "__init__.py").exists()
        link = ROOT / "d3serve" / room
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{room}"


def test_the_api_never_loads_torch() -> None:
    code = (
        "import sys, d3serve.api.app; "
        "bad = {'torch', 'transformers', 'triton'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_hugging_face_kernels_is_not_shadowed_from_the_root() -> None:
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert str(ROOT) not in done.stdout, "a root folder named kernels must stay a bare namespace"


@pytest.mark.slow
def test_the_wheel_holds_every_room_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"d3serve"}
    for path in [p for room in ("d3serve", *ROOMS) for p in sources(room)]:
        relative = path.relative_to(ROOT)
        wanted = relative if relative.parts[0] == "d3serve" else Path("d3serve") / relative
        assert str(wanted) in names
    scripts = {f"d3serve/{p.relative_to(ROOT / 'd3serve')}" for p in (ROOT / "d3serve").rglob("*.lua")}
    assert scripts <= set(names)
    pages = {f"d3serve/{p.relative_to(ROOT)}" for p in (ROOT / "api" / "pages").rglob("*.*")}
    assert pages
    assert pages <= set(names)
    assert "d3serve/evaluation/page.html.j2" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    bundled = {f"d3serve/{path.relative_to(ROOT)}" for path in (ROOT / "checkpoints" / "demo-d3").iterdir()}
    assert {name for name in names if name.startswith("d3serve/checkpoints/")} == bundled


def test_a_tree_whose_links_became_files_is_not_built(tmp_path: Path) -> None:
    """As they do in a zip file of the repository, and in git on Windows."""
    tree = tmp_path / "d3serve-main"
    shutil.copytree(ROOT / "d3serve", tree / "d3serve", symlinks=True)
    for room in ROOMS:
        shutil.copytree(ROOT / room, tree / room)
        link = tree / "d3serve" / room
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(tree),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    broken = ", ".join(f"d3serve/{room}" for room in sorted(ROOMS))
    assert f"error: {broken}: links became plain files" in done.stdout + done.stderr
    assert list(tmp_path.glob("*.whl")) == []


def test_the_drawn_error_tree_is_the_real_one() -> None:
    import d3serve.errors as module

    drawn = re.findall(r"[├└]── (\w+)\s*(?:(\d{3}) (\w+))?", module.__doc__ or "")
    real = {
        name: cls
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, module.D3ServeError) and cls is not module.D3ServeError
    }
    assert {name for name, _, _ in drawn} == set(real)
    for name, status, code in drawn:
        if status:
            assert (real[name].http_status, real[name].code) == (int(status), code), name
    parents = drawn_parents(module.__doc__ or "")
    assert {name: cls.__bases__[0].__name__ for name, cls in real.items()} == parents


def test_each_code_is_one_classs_so_what_a_server_names_is_what_a_client_raises() -> None:
    import d3serve.errors as module

    kinds = [
        kind for kind in vars(module).values() if isinstance(kind, type) and hasattr(kind, "http_status")
    ]
    assert len(kinds) > 30, "the walk is broken"
    by_code = Counter(kind.code for kind in kinds)
    assert [code for code, count in by_code.items() if count > 1] == []
    assert [kind for kind in kinds if module.error_class(kind.code) is not kind] == []


def drawn_parents(doc: str) -> dict[str, str]:
    stack: list[tuple[int, str]] = []
    parents = {}
    for line in doc.splitlines():
        match = re.match(r"^(\s*)((?:[│ ]\s{3})*)(?:[├└]── )?([A-Z]\w+)", line)
        if not match or not (line.startswith("    ")):
            continue
        depth = line.index(match[3])
        while stack and stack[-1][0] >= depth:
            stack.pop()
        if stack:
            parents[match[3]] = stack[-1][1]
        stack.append((depth, match[3]))
    return parents


def test_settings_document_is_current() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == write_settings_doc.render()


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from d3serve.errors import InvalidSettings
    from d3serve.settings import Settings

    monkeypatch.setenv("D3SERVE_MODLE", "x")
    with pytest.raises(InvalidSettings, match="D3SERVE_MODLE"):
        Settings.load()


def test_settings_survive_the_trip_to_a_child_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from d3serve.settings import Settings

    first = Settings.load(port=0, data_dir=tmp_path, lanes=("offline",), state_cache_bytes=7, model="a b")
    for name, value in first.to_env().items():
        monkeypatch.setenv(name, value)
    assert Settings.load() == first


@pytest.mark.parametrize(("field", "value"), [("port", "-1"), ("dtype", "float8"), ("lanes", '["fast"]')])
def test_a_bad_setting_names_its_variable(monkeypatch: pytest.MonkeyPatch, field: str, value: str) -> None:
    from d3serve.errors import InvalidSettings
    from d3serve.settings import Settings

    monkeypatch.setenv(f"D3SERVE_{field.upper()}", value)
    with pytest.raises(InvalidSettings, match=f"D3SERVE_{field.upper()}"):
        Settings.load()


LONGEST_FILE, LONGEST_FUNCTION, LONGEST_KERNEL = 400, 50, 150
A_TABLE = {"tools/demo/labels.py:properties"}  # one entry a property; cutting it would only hide some


def oversized(paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if (lines := text.count("\n")) > LONGEST_FILE:
            found.append(f"{name}: {lines} lines")
        limit = LONGEST_KERNEL if name.startswith("kernels/") else LONGEST_FUNCTION
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > limit and f"{name}:{node.name}" not in A_TABLE:
                    found.append(f"{name}:{node.name}: {size} lines")
    return found


def test_files_and_functions_stay_small() -> None:
    paths = [path for folder in (*LAW, "benchmarks", "tools") for path in sources(folder)]
    assert oversized(paths) == []


def test_an_oversized_function_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("def long():\n" + "    pass\n" * 50)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert oversized([tmp_path / "long.py"]) == ["long.py:long: 51 lines"]


def twins(paths: list[Path]) -> list[str]:
    """Public classes of one name: whoever reads or greps it must find one meaning."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return [f"{name}: {', '.join(files)}" for name, files in found.items() if len(files) > 1]


def test_no_two_public_classes_have_one_name() -> None:
    assert twins([path for room in LAW for path in sources(room)]) == []


def test_a_second_class_of_a_name_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("class Call:\n    pass\n\n\nclass _Own:\n    pass\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert twins([tmp_path / "one.py", tmp_path / "two.py"]) == ["Call: one.py, two.py"]


def test_there_are_no_more_settings_than_an_operator_has_a_use_for() -> None:
    from d3serve.settings import Settings

    # The 37th is linear_rule: only a user's own GPU tells which gated delta rule is the right one there.
    # The 38th is workers: how many of a host's GPUs are d3serve's, only its operator knows.
    # The 39th is state_cache_dir: which of a host's drives is fast, and may hold what users said, likewise.
    # The 40th is attention: only a user knows whether answers may be others, for a long state in 0.7 of the time.
    assert len(Settings.model_fields) <= 40, (
        "a number that nobody would change is a constant, with its reason"
    )
