"""`d3serve check`: a package against its own manifest."""

import pytest
from editing import edit

from d3serve.errors import InvalidCheckpoint
from d3serve.model import manifest
from d3serve.model.manifest import MANIFEST, check_package


def test_a_whole_package_has_no_problems(package):
    report = check_package(package)
    assert report.problems == ()
    assert report.attention_mode == "prefix_bidir"
    assert report.weights == "plain"
    assert report.layers == "6 (4 linear, 2 full attention)"
    assert report.parameters["readout"] == 255 * 128
    assert report.parameters["loaded"] == report.parameters["text"] + report.parameters["readout"]
    assert report.files_checked == len(list(package.iterdir())) - 1


def flip_a_byte(package):
    content = bytearray((package / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (package / "model.safetensors").write_bytes(content)


def test_every_byte_is_hashed(package, monkeypatch):
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 1_000)
    assert check_package(package).problems == ()
    flip_a_byte(package)
    (found,) = check_package(package).problems
    assert "model.safetensors: has SHA-256" in found


DAMAGE = {
    "model.safetensors: has SHA-256": flip_a_byte,
    "tokenizer.json: is missing": lambda p: (p / "tokenizer.json").unlink(),
    "chat_template.jinja: has ": lambda p: (p / "chat_template.jinja").write_text("x"),
    "extra.safetensors: is not in the manifest": lambda p: (p / "extra.safetensors").write_bytes(b""),
    "../x: lies outside": lambda p: edit(p, MANIFEST, lambda m: m["files_sha256"].update({"../x": "0"})),
    "schema is 'd3-package-manifest/2'": lambda p: edit(
        p, MANIFEST, lambda m: m.update(schema="d3-package-manifest/2")
    ),
    "parameters: readout has 32,640; the manifest says 1": lambda p: edit(
        p, MANIFEST, lambda m: m.update(parameters={"readout": 1})
    ),
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_each_damage_is_told(problem, package):
    DAMAGE[problem](package)
    (found,) = check_package(package).problems
    assert problem in found


@pytest.mark.parametrize(
    "change", [{"files_sha256": None}, {"files_sha256": []}, {"files_bytes": 7}, {"parameters": []}]
)
def test_a_manifest_of_another_shape_cannot_be_read(change, package):
    edit(package, MANIFEST, lambda m: m.update(change))
    with pytest.raises(InvalidCheckpoint, match="expected an object"):
        check_package(package)


def test_a_package_without_a_manifest_cannot_be_checked(package):
    (package / MANIFEST).unlink()
    with pytest.raises(InvalidCheckpoint, match=MANIFEST):
        check_package(package)
