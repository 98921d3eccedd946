"""The manifests name settings, keys and commands that exist."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import d3serve
from d3serve.settings import Settings
from d3serve.store.keys import Keys

FOLDER = Path(d3serve.__file__).parents[1] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
DOCUMENTS = [document for file in FILES for document in yaml.safe_load_all(file.read_text())]


def containers():
    for document in DOCUMENTS:
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield from document["spec"]["template"]["spec"]["containers"]


def environment():
    [config] = [document for document in DOCUMENTS if document["kind"] == "ConfigMap"]
    told = dict(config["data"])
    for container in containers():
        told |= {entry["name"]: entry["value"] for entry in container.get("env", ())}
    return {name: value for name, value in told.items() if name.startswith("D3SERVE_")}


def test_every_setting_exists_and_is_accepted(monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    settings = Settings.load()
    assert settings.lanes == ("interactive", "offline")
    assert settings.redis_url == "redis://d3serve-broker:6379/0"


def test_the_scaler_looks_at_keys_of_the_job_table():
    [scaler] = [document for document in DOCUMENTS if document["kind"] == "ScaledObject"]
    key = Keys(Settings().namespace)
    watched = [trigger["metadata"]["listName"] for trigger in scaler["spec"]["triggers"]]
    assert watched == [key("queued", "interactive"), key("queued", "offline"), key("leases")]


def test_probes_run_modules_that_exist():
    commands = [
        c[p]["exec"]["command"] for c in containers() for p in c if p.endswith("Probe") and "exec" in c[p]
    ]
    modules = {command[2] for command in commands if command[:2] == ["python", "-m"]}
    assert modules == {"d3serve.worker.health"}
    assert all(find_spec(module) for module in modules)


def test_nothing_outlives_its_grace_period():
    waits = {
        document["metadata"]["name"]: document["spec"]["template"]["spec"].get(
            "terminationGracePeriodSeconds"
        )
        for document in DOCUMENTS
        if document["kind"] == "Deployment"
    }
    assert waits["d3serve-api"] > Settings().max_wait_s
    assert waits["d3serve-worker"] > 60


def test_the_broker_never_evicts_and_keeps_its_file():
    [broker] = [container for container in containers() if container["name"] == "valkey"]
    arguments = dict(zip(broker["args"][::2], broker["args"][1::2], strict=True))
    assert (arguments["--maxmemory-policy"], arguments["--appendonly"]) == ("noeviction", "yes")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_document_says_what_it_is(file):
    for document in yaml.safe_load_all(file.read_text()):
        assert {"apiVersion", "kind"} <= document.keys()
