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
use = {"check": check_package, "load": lambda path: DecisionEngine.load(str(path), device="cpu")}[sys.argv[2]]

def callers(frame):
    while frame := frame.f_back:
        yield frame.f_globals.get("__name__", "").partition(".")[0]
        yield frame.f_code.co_name

def count(event, args):
    if event == "open" and Path(str(args[0])).parent == folder and str(args[0]).endswith(".json"):
        if not {"transformers", "_digest_file", "_sha256"} & set(callers(sys._getframe(0))):
            opened[Path(args[0]).name] += 1

sys.addaudithook(count)
use(folder)
print(json.dumps(opened))
"""
READ = ["MODEL_MANIFEST.json", "config.json", "decision_config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("use", ["load", "check"])
def test_each_json_file_is_read_once(use, tmp_path, checkpoint_tool):
    package = checkpoint_tool.write_checkpoint(tmp_path, checkpoint_tool.Variant(shards=2))
    found = subprocess.run(
        [sys.executable, "-c", COUNT, str(package), use], capture_output=True, text=True, check=True
    )
    media = ["preprocessor_config.json", "video_preprocessor_config.json"]
    assert json.loads(found.stdout) == dict.fromkeys([*READ, *media, "tokenizer_config.json"], 1)


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
