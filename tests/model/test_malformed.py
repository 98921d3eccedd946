"""Whatever a package's files hold, a user reads one line that names the file; never a traceback."""

import json
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from d3serve.commands.main import app
from d3serve.errors import D3ServeError, InvalidCheckpoint
from d3serve.model.checkpoint import _Loading
from d3serve.model.compressed import Scheme
from d3serve.model.engine import DecisionEngine
from d3serve.model.manifest import check_package

JUNK = [
    None, True, -1, 0, 2**70, 1.5, float("nan"), "", "x", "\ud800", "\x00", ".", "é" * 300,
    [], {}, [1], ["a"], {"a": 1},
]  # fmt: skip
NAMES = ["config.json", "decision_config.json", "MODEL_MANIFEST.json", "model.safetensors.index.json"]
WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def two_shards(checkpoint_tool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "package"
    variant = checkpoint_tool.Variant(layers=("linear", "full"), shards=2)
    return checkpoint_tool.write_checkpoint(folder, variant)


@pytest.fixture
def package(two_shards, tmp_path):
    return shutil.copytree(two_shards, tmp_path / "package")


def with_header(package, change, length=None):
    """Write the first shard again with its header changed, or with another length said to be the header's."""
    content = (package / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    said = struct.pack("<Q", len(text) if length is None else length)
    (package / WEIGHTS).write_bytes(said + text + content[8 + size :])


def first(header):
    return header[next(name for name in header if name != "__metadata__")]


def write(name, content):
    return lambda package: (package / name).write_bytes(content)


DAMAGED = {
    "cut in its data": lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:-10]),
    "cut in its header": lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:100]),
    "empty": write(WEIGHTS, b""),
    "seven bytes": write(WEIGHTS, b"1234567"),
    "longer than its tensors": lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes() + b"abc"),
    "a header of exabytes": lambda p: with_header(p, dict.copy, length=2**63),
    "a header longer than the file": lambda p: with_header(p, dict.copy, length=10**9),
    "a header of nothing": lambda p: with_header(p, dict.copy, length=0),
    "a header that is no object": write(WEIGHTS, struct.pack("<Q", 8) + b"[1, 2]  "),
    "a header of deep brackets": write(WEIGHTS, struct.pack("<Q", 100_000) + b"[" * 100_000),
    "a type of its own": lambda p: with_header(p, lambda h: first(h).update(dtype="Q7")),
    "a type of another size": lambda p: with_header(p, lambda h: first(h).update(dtype="F64")),
    "a negative shape": lambda p: with_header(p, lambda h: first(h).update(shape=[-1])),
    "a shape beyond counting": lambda p: with_header(p, lambda h: first(h).update(shape=[2**62, 4])),
    "offsets that overlap": lambda p: with_header(p, lambda h: first(h).update(data_offsets=[0, 2])),
    "a folder": lambda p: ((p / WEIGHTS).unlink(), (p / WEIGHTS).mkdir()),
    "gone": lambda p: (p / WEIGHTS).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_shard_is_named_by_both_commands(damage, package):
    DAMAGED[damage](package)
    for use in (lambda: DecisionEngine.load(str(package), device="cpu"), lambda: check_package(package)):
        with pytest.raises(InvalidCheckpoint) as refused:
            use()
        assert WEIGHTS in refused.value.message
        assert "\n" not in refused.value.message


def index_of(**weight_map):
    return json.dumps({"weight_map": weight_map}).encode()


DESCRIPTIONS = {
    "config.json cannot be read": write("config.json", b'{"a": '),
    "config.json is no JSON object": write("config.json", b"[]"),
    "decision_config.json cannot be read": write("decision_config.json", b"[" * 100_000),
    "can't decode byte 0xff": write("decision_config.json", b"\xff\xfe"),
    "surrogates not allowed": write("model.safetensors.index.json", index_of(a="\ud800")),
    "model.safetensors.index.json: weight_map is no object": write("model.safetensors.index.json", b"{}"),
    "nowhere.safetensors is missing": write(
        "model.safetensors.index.json", index_of(a="nowhere.safetensors")
    ),
    "é is missing from": write("model.safetensors.index.json", index_of(a="é" * 300)),
    "the tokenizer in ": lambda p: edit(p, "tokenizer.json", ("model", "vocab", "the"), "no number"),
    "vocab_size is 1180591620717411303424": lambda p: edit(
        p, "config.json", ("text_config", "vocab_size"), 2**70
    ),
}


def edit(package, name, path, value):
    values = json.loads((package / name).read_text())
    target = values
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    (package / name).write_text(json.dumps(values))


@pytest.mark.parametrize("reason", DESCRIPTIONS)
def test_a_damaged_description_is_told(reason, package):
    DESCRIPTIONS[reason](package)
    with pytest.raises(InvalidCheckpoint) as refused:
        DecisionEngine.load(str(package), device="cpu")
    assert reason in refused.value.message
    assert "\n" not in refused.value.message


def places(value, path=()):
    """Every place in a JSON value, lists by their first entries."""
    if path:
        yield path
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    )
    for key, each in inner:
        yield from places(each, (*path, key))


@pytest.mark.parametrize("seed", range(3))
def test_junk_anywhere_is_refused_or_harmless(seed, two_shards, package):
    messages = []
    chance = random.Random(seed)  # noqa: S311  (repeatable, not secret)
    for _ in range(40):
        name = chance.choice(NAMES)
        edit(
            package,
            name,
            chance.choice(list(places(json.loads((two_shards / name).read_text())))),
            chance.choice(JUNK),
        )
        for use in (lambda: DecisionEngine.load(str(package), device="cpu"), lambda: check_package(package)):
            try:
                use()
            except D3ServeError as error:
                messages.append(error.message)
        shutil.copy(two_shards / name, package / name)
    assert messages
    "".join(messages).encode()  # they can be printed
    assert not any("\n" in message for message in messages)


DOWN = "language_model.layers.0.mlp.down_proj.weight"
ODD_WEIGHTS = {
    "is there twice": {f"{DOWN}_scale": torch.ones(128, 1)},
    "is torch.int32": {DOWN: torch.ones(128, 256, dtype=torch.int32)},
}


@pytest.mark.parametrize("reason", ODD_WEIGHTS)
def test_odd_weights_are_refused_while_they_are_quantized(reason, package):
    """Read first, whatever stands in the files after them."""
    index = json.loads((package / "model.safetensors.index.json").read_text())
    name = next(iter(ODD_WEIGHTS[reason]))
    if holder := index["weight_map"].get(name):
        tensors = load_file(package / holder)
        del tensors[name]
        save_file(tensors, package / holder)
    save_file(ODD_WEIGHTS[reason], package / "a.safetensors")
    index["weight_map"][name] = "a.safetensors"
    (package / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidCheckpoint, match=reason) as refused:
        DecisionEngine.load(str(package), device="cpu", quantization="fp8")
    assert refused.value.field == DOWN


def test_of_two_threads_that_bring_one_tensor_the_later_is_refused():
    """Each has seen that the tensor is missing; only one may fill it."""
    loading = _Loading({"norm.weight": torch.zeros(2)}, Scheme("plain"), torch.device("cpu"))
    path = Path("model.safetensors")
    loading._put("norm.weight", torch.ones(2), path, "norm.weight")
    with pytest.raises(InvalidCheckpoint, match=r"norm\.weight is there twice"):
        loading._put("norm.weight", torch.ones(2), path, "norm.weight")


def test_check_ends_with_one_line(package):
    DAMAGED["cut in its data"](package)
    outcome = CliRunner().invoke(app, ["check", str(package)])
    assert isinstance(outcome.exception, InvalidCheckpoint), "which main() prints as one line"
    assert outcome.output == ""
