"""Answers of other weights are never taken for a package's own, whatever its folder is called."""

import os
import shutil

import numpy as np
import pytest
from editing import edit
from safetensors.torch import load_file, save_file

from d3serve.model.engine import DecisionEngine
from d3serve.model.hub import LocatedPackage


def retrain(folder):
    name = "readout.safetensors"
    tensors = load_file(folder / name)
    last = max(tensors)
    save_file({**tensors, last: tensors[last].roll(1, 0).contiguous()}, folder / name)


def retemper(folder):
    edit(folder, "decision_config.json", lambda values: values.update(temperature=0.5))


def revoice(folder):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + "{# another #}")


@pytest.mark.parametrize("change", [retrain, retemper, revoice])
def test_a_change_of_any_part_is_another_identity(package, change):
    before = LocatedPackage(package, "ck", None).identity
    assert LocatedPackage(package, "ck", None).identity == before
    change(package)
    assert LocatedPackage(package, "ck", None).identity != before


def test_the_same_package_is_the_same_on_every_machine(package, tmp_path):
    other = shutil.copytree(package, tmp_path / "elsewhere" / "another name")
    for path in other.iterdir():
        os.utime(path, (0, 0))
    assert LocatedPackage(other, "ck", None).identity == LocatedPackage(package, "ck", None).identity


def test_whatever_changes_answers_has_states_of_its_own(package):
    def load(**options):
        engine = DecisionEngine.load(str(package), device="cpu", **options)
        return engine.info.identity

    kinds = [
        {},
        {"dtype": "bfloat16"},
        {"load_format": "random"},
        {"special_tokens_in_text": "reference"},
        {"quantization": "fp8"},
        {"quantization": "fp8-all"},
    ]
    assert len({load(**options) for options in kinds}) == len(kinds)
    assert load() == load()


def test_no_salt_passes_for_the_start_of_a_state(tiny_checkpoint):
    engine = DecisionEngine.load(str(tiny_checkpoint), device="cpu")
    first, second = (np.array(tokens, dtype=np.int32) for tokens in ([ord("a"), 5], [5]))
    assert engine._state_key(first, "") != engine._state_key(second, "a\0\0\0")
