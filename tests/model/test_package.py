"""A package is opened once: whatever it says about itself is read and refused there, and never read again."""

import json
import shutil
import subprocess
import sys

import pytest
from editing import edit

from d3serve.errors import InvalidCheckpoint
from d3serve.model.engine import DecisionEngine
from d3serve.model.package import open_package

# Readings by anything of ours; transformers reads two of them on its own, and bytes that are hashed are not parsed.
COUNT = """
import collections, json, sys
from pathlib import Path
from d3serve.model.engine import DecisionEngine
from d3serve.model.manifest import check_package

folder, opened = Path(sys.argv[1]), collections.Counter()

def callers(frame):
    while frame := frame.f_back:
        yield frame.f_globals.get("__name__", "").partition(".")[0]
        yield frame.f_code.co_name

def count(event, args):
    if event == "open" and Path(str(args[0])).parent == folder and str(args[0]).endswith(".json"):
        if not {"transformers", "_digest_file", "_sha256"} & set(callers(sys._getframe(0))):
            opened[Path(args[0]).name] += 1

sys.addaudithook(count)
DecisionEngine.load(str(folder), device="cpu")
loading = dict(opened)
opened.clear()
check_package(folder)
automatic = "transformers.models.auto.tokenization_auto" in sys.modules
print(json.dumps({"loading": loading, "checking": opened, "automatic": automatic}))
"""
READ = ["MODEL_MANIFEST.json", "config.json", "decision_config.json", "model.safetensors.index.json"]


@pytest.fixture(scope="module")
def told(checkpoint_tool, tmp_path_factory):
    """What a process tells that has loaded a package and then checked it."""
    package = checkpoint_tool.write_checkpoint(
        tmp_path_factory.mktemp("told"), checkpoint_tool.Variant(shards=2)
    )
    command = [sys.executable, "-c", COUNT, str(package)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("use", ["loading", "checking"])
def test_each_json_file_is_read_once(use, told):
    media = ["preprocessor_config.json", "video_preprocessor_config.json"]
    assert told[use] == dict.fromkeys([*READ, *media, "tokenizer_config.json"], 1)


def test_auto_tokenizer_is_not_imported(told):
    """Its import takes longer than all else that loads such a package."""
    assert not told["automatic"]


@pytest.mark.parametrize("name", [*READ, "tokenizer_config.json"])
def test_a_damaged_description_is_refused_before_anything_is_built(
    name, tmp_path, checkpoint_tool, monkeypatch
):
    package = checkpoint_tool.write_checkpoint(tmp_path, checkpoint_tool.Variant(shards=2))
    (package / name).write_bytes(b"\x00{]")
    monkeypatch.setattr("d3serve.model.assembly.choose_format", None)  # nothing may come so far
    for use in (lambda: open_package(package), lambda: DecisionEngine.load(str(package), device="cpu")):
        with pytest.raises(InvalidCheckpoint, match=f"^{name} cannot be read: ") as refused:
            use()
        assert refused.value.field == name


def test_what_it_says_is_kept_together(package):
    edit(package, "decision_config.json", lambda values: values.update(validated_length=64))
    opened = open_package(package)
    shutil.rmtree(package)
    assert opened.decision.validated_length == 64
    assert opened.geometry.full_layers == 2
    assert opened.scheme.kind == "plain"
    assert [path.name for path in opened.weight_files] == ["model.safetensors"]
    assert opened.manifest.values["schema"] == "d3-package-manifest/1"


def test_a_package_needs_no_manifest_to_be_served(package):
    (package / "MODEL_MANIFEST.json").unlink()
    assert DecisionEngine.load(str(package), device="cpu").info.attention_mode == "prefix_bidir"
