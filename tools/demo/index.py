"""Debian's package index as labelled text: what apt downloads, parsed, split and written as one file.

Sections and debtags were assigned by Debian's maintainers and reviewers; nothing here invents a label.
"""

import hashlib
import json
import lzma
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

SUITE = "bookworm"
SOURCE = (
    f"Debian 12 ({SUITE}), component main, amd64: package index and English descriptions, as apt ships them"
)
# Sections that say how a package is shipped rather than what it is about.
UNTOLD = frozenset({"oldlibs", "metapackages", "tasks", "otherosfs"})

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Package:
    """One binary package. `dependents` counts the packages of the suite that depend on it."""

    name: str
    source: str
    section: str
    tags: tuple[str, ...]
    summary: str
    body: str
    depends: tuple[str, ...]
    dependents: int
    architecture: str
    size_kb: int

    @property
    def split(self) -> Split:
        """By the source package, so that near-copies (library, headers, documentation) stay together."""
        share = int(hashlib.sha256(self.source.encode()).hexdigest()[:8], 16) % 100
        return "test" if share < 5 else "validation" if share < 8 else "train"


def download(lists: Path) -> None:
    """Let apt fetch the index with English descriptions into `lists`, apart from the system's own lists.

    Raises:
        CalledProcessError: apt cannot reach its mirrors.
    """
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", *_options(lists), "update", "-qq"], check=True)  # noqa: S603, S607


def read_index(lists: Path) -> list[Package]:
    """Parse the lists that `download` fetched; packages in the index's order."""
    texts = {
        part["Description-md5"]: part["Description-en"] for part in _stanzas(_list(lists, "Translations"))
    }
    stanzas = [s for s in _stanzas(_list(lists, "Packages")) if s["Section"] not in UNTOLD]
    dependents = Counter(name for stanza in stanzas for name in set(_depends(stanza)))
    return [_package(stanza, texts, dependents) for stanza in stanzas if stanza["Description-md5"] in texts]


def save(packages: Sequence[Package], path: Path) -> None:
    """Write one JSON object a line, compressed."""
    with lzma.open(path, "wt", encoding="utf-8") as file:
        for package in packages:
            file.write(json.dumps(asdict(package), ensure_ascii=False) + "\n")


def load(path: Path) -> list[Package]:
    """Read what `save` wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [Package(**(row | {"tags": tuple(row["tags"]), "depends": tuple(row["depends"])})) for row in rows]


def split(packages: Sequence[Package], wanted: Split) -> list[Package]:
    """The packages of one split; held-out texts that also stand in the training split are left out."""
    chosen = [package for package in packages if package.split == wanted]
    if wanted == "train":
        return chosen
    known = {package.body for package in packages if package.split == "train"}
    return [package for package in chosen if package.body not in known or not package.body]


def one_per_source(packages: Sequence[Package]) -> list[Package]:
    """The first package of each section of each source: no source weighs more than its kinds of package."""
    return list({(package.source, package.section): package for package in reversed(packages)}.values())[::-1]


def _options(lists: Path) -> list[str]:
    return ["-o", f"Dir::State::Lists={lists}", "-o", "Acquire::Languages=en"]


def _list(lists: Path, kind: str) -> str:
    """The text of one downloaded list of SUITE, decompressed by apt's own helper."""
    columns = ["--format", "$(CREATED_BY) $(CODENAME) $(COMPONENT) $(FILENAME)"]
    command = ["apt-get", *_options(lists), "indextargets", *columns]
    targets = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    prefix = f"{kind} {SUITE} main "
    found = next(line.removeprefix(prefix) for line in targets.splitlines() if line.startswith(prefix))
    reader = ["/usr/lib/apt/apt-helper", "cat-file", found]
    return subprocess.run(reader, capture_output=True, text=True, check=True).stdout  # noqa: S603


def _stanzas(text: str) -> Iterator[dict[str, str]]:
    for stanza in text.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith(" "):
                fields[name] += "\n" + line[1:]
            else:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
        if fields:
            yield fields


def _depends(stanza: dict[str, str]) -> list[str]:
    """Names that must be installed; of alternatives the first, without versions and architectures."""
    first = (item.split("|")[0].split() for item in stanza.get("Depends", "").split(",") if item.strip())
    return [words[0].split(":")[0] for words in first]


def _package(stanza: dict[str, str], texts: dict[str, str], dependents: Counter[str]) -> Package:
    summary, _, body = texts[stanza["Description-md5"]].partition("\n")
    tags = [tag.strip() for tag in stanza.get("Tag", "").replace("\n", " ").split(",") if tag.strip()]
    return Package(
        name=stanza["Package"],
        source=stanza.get("Source", stanza["Package"]).split()[0],
        section=stanza["Section"],
        tags=tuple(tag for tag in tags if not tag.endswith("::TODO")),
        summary=summary.strip(),
        body=_reflow(body),
        depends=tuple(_depends(stanza)),
        dependents=dependents[stanza["Package"]],
        architecture=stanza["Architecture"],
        size_kb=int(stanza.get("Installed-Size", "0")),
    )


def _reflow(body: str) -> str:
    """Join wrapped lines to paragraphs; lines that begin with a space (lists) keep their own line."""
    paragraphs: list[str] = []
    fresh = True
    for line in body.splitlines():
        if line.strip() == ".":
            fresh = True
        elif fresh or line.startswith(" ") or not paragraphs:
            paragraphs.append(line.strip())
            fresh = False
        else:
            paragraphs[-1] += " " + line.strip()
    return "\n".join(paragraphs)
