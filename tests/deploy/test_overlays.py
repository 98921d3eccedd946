"""The overlays for small, GPU and many-worker installations: rendered, valid, and different in what they say."""

import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kustomize import containers, named, render

import d3serve
from d3serve.settings import BUNDLED, Settings

FOLDER = Path(d3serve.__file__).parents[1] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
VERSIONS = ["1.29", kubernetes_validate.latest_version()]


def rendered(name):
    return render(FOLDER / "overlays" / name)


def test_these_are_all():
    assert OVERLAYS == ["gpu", "many-workers", "small"]
    assert render(FOLDER) == rendered("gpu"), "what `kubectl apply -k deploy/kubernetes` starts"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl")
@pytest.mark.parametrize("name", OVERLAYS)
def test_kubectl_renders_the_same(name):
    command = ["kubectl", "kustomize", str(FOLDER / "overlays" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    theirs = list(yaml.safe_load_all(done.stdout))

    def by_name(documents):
        return {(each["kind"], each["metadata"]["name"]): each for each in documents}

    assert by_name(theirs) == by_name(rendered(name))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OVERLAYS)
def test_every_document_fits_the_schema_of_its_kind(name, version):
    for document in rendered(name):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_worker_starts_with_what_it_is_told(name, monkeypatch):
    documents = rendered(name)
    told = dict(named(documents, "d3serve", ("ConfigMap",))["data"])
    [worker] = named(documents, "d3serve-worker")["spec"]["template"]["spec"]["containers"]
    told |= {row["name"]: row["value"] for row in worker["env"] if "value" in row}
    for variable, value in told.items():
        monkeypatch.setenv(variable, value)
    settings = Settings.load()
    on_gpu = name != "small"
    assert (settings.device == "cuda") is on_gpu
    assert ("nvidia.com/gpu" in worker["resources"]["limits"]) is on_gpu
    assert ("worker-gpu" in worker["image"]) is on_gpu
    assert (Path(settings.model).name == BUNDLED) is not on_gpu


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_image_has_a_full_version_and_ours_the_place_to_edit(name):
    for container in containers(rendered(name)):
        image, _, tag = container["image"].rpartition(":")
        assert image.startswith("registry.example.com/d3serve-") or image == "valkey/valkey"
        assert tag == d3serve.__version__ if "d3serve" in image else tag.count(".") == 2


def test_many_workers_are_many_and_are_drained_one_at_a_time():
    documents, one = rendered("many-workers"), rendered("gpu")
    for name in ("d3serve-worker", "d3serve-api"):
        assert named(documents, name)["spec"]["replicas"] > named(one, name)["spec"]["replicas"]
        budget = named(documents, name, ("PodDisruptionBudget",))["spec"]
        labels = named(documents, name)["spec"]["template"]["metadata"]["labels"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()
        assert budget["maxUnavailable"] == 1


def test_a_small_one_fits_a_small_cluster():
    requests = [container["resources"]["requests"] for container in containers(rendered("small"))]
    assert not [each for each in requests if each["memory"].endswith("Gi") and int(each["memory"][:-2]) > 1]
    assert {each["cpu"] for each in requests} == {"1", "200m", "100m"}


def test_the_way_to_the_images_is_told():
    readme = (FOLDER / "README.md").read_text()
    for image in ("d3serve-api", "d3serve-worker", "d3serve-worker-gpu"):
        assert f"docker push registry.example.com/{image}:{d3serve.__version__}" in readme
    assert "registry.example.com" in readme.partition("```sh")[0], "what to edit stands before the commands"
