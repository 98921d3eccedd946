"""Which card it is, is asked in one place: an `if` on a card elsewhere is a choice that no test without it can see."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("api", "worker", "model", "kernels", "d3serve")
QUESTIONS = {
    "get_device_capability", "get_device_properties", "get_device_name", "get_arch_list", "hip", "capability",
    "is_hopper", "has_float8", "feeds_from_shared", "widest_cudnn_head",
}  # fmt: skip
MAY_ASK = {"kernels/cards.py", "kernels/attention_tiles.py", "model/placement.py"}
# launchers: tile tables, which kernel multiplies by INT4, and whether a library takes a long state
MAY_CHOOSE = {
    "kernels/int4.py": {"feeds_from_shared", "is_hopper"},
    "kernels/gated_delta.py": {"feeds_from_shared"},
    "kernels/attention_dense.py": {"widest_cudnn_head"},
}


def questions(path: Path) -> set[str]:
    """The names of what a file asks about a card."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} & QUESTIONS


def test_only_placement_and_the_tile_tables_ask_which_card_it_is():
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    asked = {str(path.relative_to(ROOT)): questions(path) for path in files}
    assert asked["kernels/cards.py"], "nothing found: the walk is broken"
    unlawful = {
        name: found - MAY_CHOOSE.get(name, set())
        for name, found in asked.items()
        if name not in MAY_ASK and not (ROOT / name).parents[0].is_symlink()
    }
    assert {name: found for name, found in unlawful.items() if found} == {}


@pytest.mark.parametrize(
    "line", ["torch.cuda.get_device_name()", "torch.version.hip", "card.capability >= (9, 0)"]
)
def test_a_question_is_seen(line, tmp_path):
    path = tmp_path / "a.py"
    path.write_text(line)
    assert questions(path)


def test_fla_is_installed_with_a_gpu_alone():
    """Beside a CPU's torch it breaks Qwen3.5 in transformers, so no install without a GPU may bring it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    with_fla = {
        name
        for name, needs in extras.items()
        if any(each.startswith("flash-linear-attention") for each in needs)
    }
    assert with_fla == {"gpu"}
    with_gpu = {
        name for name, needs in extras.items() if any(re.match(r"d3serve\[.*gpu", each) for each in needs)
    }
    assert with_gpu == set()
    assert not any("flash" in each for each in project["dependencies"])
