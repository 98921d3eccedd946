"""The compose file fits its schema, and starts what it says with no more rights than it needs."""

import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

import d3serve
from d3serve.settings import Settings

ROOT = Path(d3serve.__file__).parents[1]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(TEXT)
SERVICES = COMPOSE["services"]
OURS = {name for name, service in SERVICES.items() if "build" in service}
WATCH = {"prometheus", "grafana"}
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def started_by(profile: str) -> set[str]:
    return {name for name, service in SERVICES.items() if profile in service.get("profiles", [profile])}


def test_it_fits_the_schema():
    schema = get_builtin_schema("vendor.compose-spec")
    jsonschema.validators.validator_for(schema)(schema).validate(COMPOSE)


def test_each_profile_has_one_kind_of_worker():
    assert started_by("cpu") == {"broker", "api", "webhooks", "batches", "worker"}
    assert started_by("gpu") == {"broker", "api", "webhooks", "batches", "worker-gpu"}
    assert started_by("two-gpus") == started_by("gpu") | {"worker-gpu-1"}
    assert started_by("monitoring") == {"broker", "api", "webhooks", "batches", *WATCH}, (
        "beside whichever worker is chosen"
    )
    assert "COMPOSE_PROFILES=cpu" in TEXT.splitlines()[0], "what `docker compose up` starts is told"


def test_no_two_workers_are_given_one_gpu():
    gpus = [
        gpu
        for name in started_by("two-gpus")
        if "deploy" in SERVICES[name]
        for device in SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        for gpu in device["device_ids"]
    ]
    assert sorted(gpus) == ["0", "1"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_privileges(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].partition(":")[0]) > 0
    if name in OURS:
        assert service["user"] == "10001:10001"
        assert any(place.partition(":")[0] == "/tmp" for place in service["tmpfs"])  # noqa: S108


@pytest.mark.parametrize("name", ["worker", "worker-gpu", "worker-gpu-1"])
def test_a_worker_is_not_killed_while_its_grace_lasts(name):
    waits, grace = SERVICES[name]["stop_grace_period"], SERVICES[name]["environment"]["D3SERVE_STOP_GRACE_S"]
    assert waits.endswith("s")
    assert float(waits[:-1]) - 5 > float(grace)


def test_the_broker_is_reached_with_a_password_and_by_ours_alone():
    assert COMPOSE["networks"]["queue"]["internal"] is True
    assert SERVICES["broker"]["networks"] == ["queue"]
    assert "ports" not in SERVICES["broker"]
    for name in OURS | {"broker"}:
        variable = SERVICES[name]["environment"]["REDISCLI_AUTH" if name == "broker" else "D3SERVE_REDIS_URL"]
        assert "${BROKER_PASSWORD:?" in variable, "one that is not set ends `docker compose up`"


def test_the_api_is_on_this_host_alone_and_refuses_pages_of_others(monkeypatch):
    assert [port.rpartition(":")[0] for port in SERVICES["api"]["ports"]] == ["127.0.0.1:8000"]
    for name, value in SERVICES["api"]["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+(:[-?]([^}]*))?\}", "x", value))
    settings = Settings.load()
    assert settings.allow_anonymous
    assert settings.allowed_hosts == (), "a name here, or *, would be let past the guard against web pages"


def test_images_have_full_versions_and_tested_packages():
    images = {name: service["image"] for name, service in SERVICES.items() if "image" in service}
    assert images.keys() == SERVICES.keys() - OURS
    assert re.fullmatch(r"\$\{VALKEY_IMAGE:-valkey/valkey:\d+\.\d+\.\d+-alpine\}", images["broker"])
    assert re.fullmatch(r"\$\{PROMETHEUS_IMAGE:-prom/prometheus:v\d+\.\d+\.\d+\}", images["prometheus"])
    assert re.fullmatch(r"\$\{GRAFANA_IMAGE:-grafana/grafana:\d+\.\d+\.\d+\}", images["grafana"])
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["${PYTHON_IMAGE}", "base", "base"]
    installs = re.findall(r"pip install -c (\S+).* \"?\.(\[\S+\])?", DOCKERFILE)
    assert installs == [
        ("constraints.txt", "[otel]"),
        ("constraints-gpu.txt", "[gpu,media,otel]"),
        ("constraints.txt", "[$EXTRA,media,otel]"),
    ]
    assert DOCKERFILE.count("pip install") == 3


def test_an_image_ends_as_a_numeric_user_and_has_all_that_a_build_needs():
    for stage in DOCKERFILE.split("\nFROM ")[2:]:
        assert re.findall(r"^USER (\S+)$", stage, re.MULTILINE) == ["10001:10001"]
    copied = set(" ".join(re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)).split())
    assert {
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "constraints-gpu.txt",
        "LICENSE",
        "README.md",
    } <= copied
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    assert {path.name for path in (ROOT / "d3serve").iterdir() if path.is_symlink()} <= copied, "every room"


def test_volumes_are_folders_that_the_image_gives_to_its_user():
    owned = re.search(r"install -d -o d3serve -g d3serve (.*)", DOCKERFILE)[1].split()
    mounted = {place.partition(":")[2] for name in OURS for place in SERVICES[name].get("volumes", ())}
    assert mounted == set(owned)
