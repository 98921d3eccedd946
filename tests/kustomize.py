"""What `kubectl kustomize` makes of our overlays, as far as they go, for machines without kubectl.

Bases and files, replicas, images by name and JSON patches (RFC 6902: add and replace) by kind and name, in the order
in which kustomize applies them. Anything else in a kustomization is an error here, so that nothing is passed over.
tests/deploy/test_overlays.py compares it with kubectl where there is one.
"""

import copy
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
KNOWN = {"apiVersion", "kind", "resources", "replicas", "images", "patches"}


def render(folder: Path) -> list[Document]:
    """The documents of a kustomization."""
    told = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert told.keys() <= KNOWN, f"{folder}: {told.keys() - KNOWN}"
    documents: list[Document] = []
    for name in told["resources"]:
        path = folder / name
        documents += render(path) if path.is_dir() else [*yaml.safe_load_all(path.read_text())]
    identities = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(set(identities)) == len(identities), f"{folder}: a document stands twice"
    for patch in told.get("patches", ()):
        _patch(documents, **patch)
    for replicas in told.get("replicas", ()):
        named(documents, replicas["name"])["spec"]["replicas"] = replicas["count"]
    for image in told.get("images", ()):
        for container in containers(documents):
            if container["image"] == image["name"]:
                container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
    return documents


def named(
    documents: list[Document], name: str, kinds: tuple[str, ...] = ("Deployment", "StatefulSet")
) -> Document:
    """The one document of a name among those kinds."""
    [found] = [each for each in documents if each["kind"] in kinds and each["metadata"]["name"] == name]
    return found


def containers(documents: list[Document]) -> list[Document]:
    """The containers of all that runs."""
    running = [each for each in documents if each["kind"] in ("Deployment", "StatefulSet")]
    return [container for each in running for container in each["spec"]["template"]["spec"]["containers"]]


def _patch(documents: list[Document], target: dict[str, str], patch: str) -> None:
    assert target.keys() == {"kind", "name"}
    document = named(documents, target["name"], (target["kind"],))
    for step in yaml.safe_load(patch):
        *way, last = (part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:])
        holder: Any = document
        for part in way:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        value = copy.deepcopy(step["value"])
        if step["op"] == "replace":
            key: Any = int(last) if isinstance(holder, list) else last
            assert isinstance(holder, list) or key in holder, step
            holder[key] = value
        elif step["op"] == "add" and isinstance(holder, list):
            assert last == "-", step
            holder.append(value)
        else:
            assert step["op"] == "add", step
            holder[last] = value
