"""The manifests fit their schemas, name settings, keys and commands that exist, and give a pod only what it needs."""

import ipaddress
from importlib.util import find_spec
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kustomize import render

import d3serve
from d3serve.api.bounds import MAX_UPLOAD_BYTES, MAX_WAIT_S
from d3serve.settings import Settings
from d3serve.store.keys import Keys

FOLDER = Path(d3serve.__file__).parents[1] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))
APART = [
    document
    for name in ("autoscale", "ingress")
    for document in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
]
DOCUMENTS = [
    *render(FOLDER),
    *APART,
]  # with the overlay for GPUs; tests/deploy/test_overlays.py has the others


OTHERS = {"ScaledObject", "TriggerAuthentication"}  # of KEDA: no schemas of Kubernetes'
VERSIONS = ["1.29", kubernetes_validate.latest_version()]
INSIDE = [
    "10.1.2.3",
    "172.20.0.1",
    "192.168.0.9",
    "169.254.169.254",
    "100.100.100.200",
    "127.0.0.1",
    "fd00::1",
    "fe80::1",
    "::1",
]
OURS = {"d3serve-api", "d3serve-batches", "d3serve-webhooks", "d3serve-worker"}


def templates():
    return {
        document["metadata"]["name"]: document["spec"]["template"]
        for document in DOCUMENTS
        if document["kind"] in ("Deployment", "StatefulSet")
    }


def containers():
    for template in templates().values():
        yield from template["spec"]["containers"]


def policies():
    return {d["metadata"]["name"]: d["spec"] for d in DOCUMENTS if d["kind"] == "NetworkPolicy"}


def environment():
    [config] = [document for document in DOCUMENTS if document["kind"] == "ConfigMap"]
    told = dict(config["data"])
    for container in containers():
        told |= {entry["name"]: entry["value"] for entry in container.get("env", ()) if "value" in entry}
    return {name: value for name, value in told.items() if name.startswith("D3SERVE_")}


def test_every_setting_exists_and_is_accepted(monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    settings = Settings.load()
    assert settings.lanes == ("interactive", "offline")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_fits_the_schema_of_its_kind(version):
    seen = set()
    for document in DOCUMENTS:
        if document["kind"] not in OTHERS:
            kubernetes_validate.validate(document, version, strict=True)
            seen.add(document["kind"])
    assert {"Deployment", "StatefulSet", "NetworkPolicy", "Ingress"} <= seen


def test_every_pod_is_without_privileges():
    for name, template in templates().items():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, "D3SERVE_PORT=tcp://... would be put into its environment"
        context = pod["securityContext"]
        assert context["runAsNonRoot"], name
        assert min(context["runAsUser"], context["runAsGroup"], context["fsGroup"]) > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        if name in OURS:
            assert (context["runAsUser"], context["fsGroup"]) == (10001, 10001), "as in the image"
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert {"requests", "limits"} <= container["resources"].keys()
            if name in OURS:
                assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]  # noqa: S108


def test_kustomize_takes_every_file_that_needs_nothing_of_the_cluster():
    base = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())
    files = {file.name for file in (FOLDER / "base").iterdir()}
    assert set(base["resources"]) == files - {"kustomization.yaml"}


def test_the_broker_asks_for_a_password_that_all_of_ours_have_from_a_secret():
    for name, template in templates().items():
        for container in template["spec"]["containers"]:
            variables = {entry["name"]: entry for entry in container["env"]}
            variable = variables["D3SERVE_REDIS_URL" if name in OURS else "REDISCLI_AUTH"]
            assert variable["valueFrom"]["secretKeyRef"]["name"] == "d3serve-broker"
    assert not [name for name, value in environment().items() if "redis://" in value]


def test_only_ours_reach_the_broker():
    assert templates().keys() == OURS | {"d3serve-broker"}
    labels = {name: template["metadata"]["labels"] for name, template in templates().items()}
    assert {label["app"] for label in labels.values()} == templates().keys()
    every = policies()["d3serve-names-only"]  # nothing comes in, and out go questions for names
    assert every["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in every
    part = every["podSelector"]["matchLabels"]
    assert all(part.items() <= label.items() for label in labels.values())
    [rule] = policies()["d3serve-broker"]["ingress"]
    [peer] = rule["from"]
    [match] = peer["podSelector"]["matchExpressions"]
    assert set(match["values"]) == OURS
    assert rule["ports"] == [{"protocol": "TCP", "port": 6379}]
    reached = [name for name, spec in policies().items() if "d3serve-broker" in str(spec["podSelector"])]
    assert set(reached) == {"d3serve-broker-from-keda", "d3serve-broker"}


def test_webhooks_and_downloads_go_to_public_addresses_only():
    for name in ("d3serve-webhooks", "d3serve-worker"):
        for rule in policies()[name]["egress"]:
            for block in (peer["ipBlock"] for peer in rule["to"]):
                network = ipaddress.ip_network(block["cidr"])
                private = [ipaddress.ip_network(cidr) for cidr in block.get("except", ())]
                for address in map(ipaddress.ip_address, INSIDE):
                    assert address not in network or any(address in cidr for cidr in private), (name, address)


def test_tls_ends_before_the_service():
    [ingress] = [document for document in DOCUMENTS if document["kind"] == "Ingress"]
    [tls], [rule] = ingress["spec"]["tls"], ingress["spec"]["rules"]
    assert tls["hosts"] == [rule["host"]]
    [path] = rule["http"]["paths"]
    [service] = [d for d in DOCUMENTS if d["kind"] == "Service" and d["metadata"]["name"] == "d3serve"]
    assert path["backend"]["service"] == {
        "name": "d3serve",
        "port": {"number": service["spec"]["ports"][0]["port"]},
    }
    notes = ingress["metadata"]["annotations"]
    assert int(notes["nginx.ingress.kubernetes.io/proxy-read-timeout"]) > MAX_WAIT_S
    assert int(notes["nginx.ingress.kubernetes.io/proxy-body-size"][:-1]) * 2**20 >= max(
        MAX_UPLOAD_BYTES, Settings().max_body_bytes
    )


def test_the_scaler_looks_at_keys_of_the_job_table():
    [scaler] = [document for document in DOCUMENTS if document["kind"] == "ScaledObject"]
    key = Keys(Settings().namespace)
    watched = [trigger["metadata"]["listName"] for trigger in scaler["spec"]["triggers"]]
    assert watched == [key("queued", "interactive"), key("queued", "offline"), key("leases")]


def test_probes_run_modules_that_exist():
    commands = [
        c[p]["exec"]["command"] for c in containers() for p in c if p.endswith("Probe") and "exec" in c[p]
    ]
    modules = {command[3] for command in commands if command[:3] == ["python", "-P", "-m"]}
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
    assert waits["d3serve-api"] > MAX_WAIT_S
    [worker] = (c for c in containers() if c["name"] == "worker")
    grace = {row["name"]: row.get("value") for row in worker["env"]}["D3SERVE_STOP_GRACE_S"]
    assert waits["d3serve-worker"] - 5 > float(grace) > Settings().stop_grace_s


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_document_says_what_it_is(file):
    for document in yaml.safe_load_all(file.read_text()):
        assert {"apiVersion", "kind"} <= document.keys()
