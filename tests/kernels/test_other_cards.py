"""What is chosen for cards that are not here: every kernel is compiled for each, and Hopper keeps what was measured."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from d3serve.kernels import cards, prefix_bidir
from d3serve.kernels.attention_tiles import DENSE_ROWS, ELSEWHERE, LARGE, SMALL, choose_tile
from d3serve.kernels.cards import Card
from d3serve.kernels.gated_delta import walk_options
from d3serve.kernels.segments import AttentionShape, Segment

ROOT = Path(__file__).parents[2]
HOPPER = Card((9, 0), 232_448, 132)
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
MOST_REGISTERS = 255  # of a thread, on all of them
# Bytes that a thread spills in BF16: a few registers, once, where a tile that does not fit spills hundreds. Triton 3.6
# spills 336 where 3.7 and 3.9 spill none, and 2 KB where they spill 264.
MOST_STACK = 384 if triton.__version__.startswith("3.6.") else 128
HEAVIEST = {"_prefix_bidir_kernel", "_merge_kernel", "_chunk_kernel", "_walk_kernel", "_int4_linear_kernel"}
FLOAT8 = {"_quantize_kernel", "_silu_mul_float8_kernel", "_narrow_linear_kernel"}


@pytest.fixture
def compile_ahead(request, tmp_path):
    """Compile for a card, without a GPU and without the interpreter that this process has."""
    has_cache = request.config.pluginmanager.has_plugin("cacheprovider")
    compiled = request.config.cache.mkdir("triton") if has_cache else tmp_path
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(compiled)}
    script = Path(__file__).with_name("compile_ahead.py")

    def run(capability, *options):
        done = subprocess.run(
            [sys.executable, str(script), str(capability), *options],
            capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2_000:]
        return json.loads(done.stdout)

    return functools.cache(run)


def assert_fits(kernels, capability):
    for each in kernels:
        assert each["shared"] <= SHARED[capability], each
        assert each["registers"] <= MOST_REGISTERS, each
        assert each["dtype"] == "float32" or each["stack"] <= MOST_STACK, each


def assert_as_promised(attention, capability):
    card = Card(divmod(capability, 10), SHARED[capability], 1)
    tile = choose_tile(group=6, head_dim=256, itemsize=2, card=card)
    assert attention["shared"] <= tile.shared_bytes(256, 2, card), "the table's formula promises too little"


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [89, 90]
)  # of each table of tiles the card with the least room; below, all
def test_the_kernels_that_take_most_fit_the_card(capability, compile_ahead):
    kernels = compile_ahead(capability)
    assert {each["kernel"] for each in kernels} == HEAVIEST
    assert_fits(kernels, capability)
    (attention,) = (each for each in kernels if each["kernel"] == "_prefix_bidir_kernel")
    assert_as_promised(attention, capability)
    packed = [each for each in kernels if each["kernel"] == "_int4_linear_kernel"]
    assert len(packed) == (7 if capability == 90 else 2)  # one of each tile
    for each in packed:
        assert each["waits"] <= each["products"] / 2, "the compiler lets each product wait for the one before"


@pytest.mark.faults
@pytest.mark.timeout(1_000)
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_fits_the_card(capability, compile_ahead):
    kernels = compile_ahead(capability, "--all")
    names = {each["kernel"] for each in kernels}
    assert names >= HEAVIEST
    assert len(names - FLOAT8) == 13
    assert (names >= FLOAT8) == (capability >= 89)
    assert_fits(kernels, capability)
    for each in kernels:
        if (each["kernel"], each["dtype"]) == ("_prefix_bidir_kernel", "bfloat16"):
            assert_as_promised(each, capability)


@pytest.mark.parametrize(
    ("group", "head_dim", "itemsize", "tile"),
    [
        (6, 256, 2, LARGE), (8, 256, 2, LARGE), (1, 128, 2, LARGE), (128, 64, 2, LARGE),
        (6, 256, 4, SMALL[1]), (4, 128, 4, SMALL[0]), (6, 96, 4, SMALL[0]), (40, 256, 4, None),
    ],
)  # fmt: skip
def test_hopper_takes_the_tiles_that_were_measured(group, head_dim, itemsize, tile):
    for card in (HOPPER, cards.INTERPRETER, HOPPER._replace(capability=(10, 0))):
        if tile is None:
            with pytest.raises(ValueError, match="no tile for 40 heads"):
                choose_tile(group=group, head_dim=head_dim, itemsize=itemsize, card=card)
        else:
            assert choose_tile(group=group, head_dim=head_dim, itemsize=itemsize, card=card) == tile


@pytest.mark.parametrize(
    ("key_dim", "block_v", "item_bytes", "stages"), [(128, 64, 2, 3), (128, 32, 4, 1), (16, 16, 2, 3)]
)
def test_hopper_walks_as_it_was_measured(key_dim, block_v, item_bytes, stages):
    assert walk_options(key_dim, block_v, item_bytes, HOPPER) == {"num_warps": 4, "num_stages": stages}


def test_cards_that_feed_tensor_cores_from_registers_take_their_own_tiles():
    for capability in (80, 86, 89, 120):
        card = Card(divmod(capability, 10), SHARED[capability], 1)
        assert choose_tile(group=6, head_dim=256, itemsize=2, card=card) == ELSEWHERE[0]
        assert walk_options(128, 64, 2, card) == {"num_warps": 8, "num_stages": 2}


@pytest.mark.parametrize(
    ("capability", "dense"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((10, 3), False), ((12, 0), False)],
)
def test_a_long_state_goes_to_cudnn_only_where_that_takes_its_heads(capability, dense, monkeypatch):
    """PyTorch bars cuDNN's attention from heads of 256 on other cards, and the warm-up's long state would not start."""
    monkeypatch.setattr(cards, "card", lambda _: Card(capability, 101_376, 100))
    shape = AttentionShape(False, 24, 4, 256, torch.bfloat16, torch.device("cuda"))
    if capability[0] == 9:
        monkeypatch.setattr(cards, "card", lambda _: HOPPER)
    cut = prefix_bidir.cut_attention([Segment(0, DENSE_ROWS.start, 0)], shape)
    assert bool(cut.dense) == dense
    assert bool(len(cut.tiles.row)) != dense
