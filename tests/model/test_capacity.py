"""The memory plan: what it counts against what was measured, and that its parts add up on any device."""

from dataclasses import replace

import pytest
import torch
import write_cards_doc
from hypothesis import given
from hypothesis import strategies as st
from published import SIZES, TURBO

from d3serve.errors import InvalidSettings
from d3serve.model.assembly import size_pools
from d3serve.model.backbone import row_bytes, slot_bytes
from d3serve.model.capacity import (
    LONGEST_PASS,
    MARGIN_BYTES,
    MAX_SLOTS,
    MLP_ROWS,
    SHORT_PASS,
    activation_bytes,
    divide_pools,
    plan_memory,
)
from d3serve.model.engine import DecisionEngine
from d3serve.model.vision import tower_activation_bytes
from d3serve.model.weights import Allocator, Kept

BF16 = torch.bfloat16
# what d3-turbo-INT4 holds; its card says that 0.3 billion weights more than d3-W4A16-AWQ's stay plain, not which
INT4 = Kept(int4=write_cards_doc.four_bits(TURBO, plain=300_000_000), group=128)


def plan(free_gb: float, *, shares_state: bool = True):
    return plan_memory(TURBO, BF16, int(free_gb * 1e9), shares_state=shares_state)


@pytest.mark.parametrize(
    ("rows", "slots", "peak_gb"), [(117_200 + 64, 2, 70.31), (65_736 + 64, 2, 62.42)], ids=["117K", "64K"]
)
def test_counts_what_an_h200_measured(rows: int, slots: int, peak_gb: float) -> None:
    """docs/records/2026-11-29-engine.md: peak of the whole pass; 51.25 GB of weights and the readout."""
    pools = rows * row_bytes(TURBO, BF16) + slots * slot_bytes(TURBO, BF16)
    counted = 51.25e9 + pools + activation_bytes(TURBO, rows - 64, BF16, mlp_rows=MLP_ROWS)
    assert counted / 1e9 == pytest.approx(peak_gb, rel=0.02)


@given(free_gb=st.floats(0, 150), shares_state=st.booleans())
def test_the_longest_pass_always_fits_beside_the_pools(free_gb: float, shares_state: bool) -> None:
    found = plan(free_gb, shares_state=shares_state)
    assert found.pass_rows <= found.rows
    if not found.pass_rows:
        return
    pools = found.rows * row_bytes(TURBO, BF16) + found.slots * slot_bytes(TURBO, BF16)
    pass_bytes = activation_bytes(TURBO, found.pass_rows, BF16, mlp_rows=found.mlp_rows)
    assert pools + pass_bytes + MARGIN_BYTES <= free_gb * 1e9
    assert found.slots >= (2 if shares_state else 1)


@given(free_gb=st.floats(0, 60), more_gb=st.floats(0, 20))
def test_more_memory_never_shortens_the_longest_pass(free_gb: float, more_gb: float) -> None:
    assert plan(free_gb).pass_rows <= plan(free_gb + more_gb).pass_rows


def test_where_memory_is_short_room_beside_the_longest_pass_is_cut_first() -> None:
    short, long = plan(8.5), plan(30.0)
    assert long.pass_rows > SHORT_PASS > short.pass_rows > 20_000
    assert long.mlp_rows == MLP_ROWS > short.mlp_rows
    assert short.slots - short.beside_slots >= 2, "a state in the making and one to answer from"
    assert short.beside_slots == 1, "and one for a short pass, which has rows beside the long one"


def test_int4_weights_of_d3_turbo_take_at_most_17_and_a_half_gb() -> None:
    """Those of the vision tower, 0.92 GB, too; 2.5 GB of embedding stand in the host's memory."""
    weights, unpacked = write_cards_doc.weight_bytes(SIZES[write_cards_doc.BIG], INT4)
    assert 14e9 < weights <= 17.5e9 - TURBO.vocab_size * TURBO.hidden * BF16.itemsize
    assert unpacked == 34_816 * 5_120 * 2


@pytest.mark.parametrize(("cap_gb", "tokens"), [(24, 24_576 + 4 * 100), (40, 117_000 + 2 * 100)])
def test_int4_holds_long_states_in_little_memory(cap_gb: float, tokens: int) -> None:
    """Beside the vision tower and its activations."""
    size = SIZES[write_cards_doc.BIG]
    weights, unpacked = write_cards_doc.weight_bytes(size, INT4)
    left = int(cap_gb * 1e9) - weights - tower_activation_bytes(write_cards_doc.vision_of(size), BF16)
    found = plan_memory(TURBO, BF16, left, shares_state=True, unpacked_bytes=unpacked)
    assert min(found.pass_rows, found.rows - found.beside_rows) >= tokens


@pytest.mark.parametrize(("device", "hosted"), [("meta", True), ("cpu", False)])
def test_beside_packed_weights_a_gpu_leaves_the_embedding_to_its_host(device: str, hosted: bool) -> None:
    geometry = replace(TURBO, vocab_size=1024, hidden=128, ffn=128, layer_types=())
    sizes = [Allocator(geometry, torch.device(device), BF16, kept) for kept in (Kept(), INT4)]
    for each in sizes:
        each.weights(1)
    embedding = geometry.vocab_size * geometry.hidden * BF16.itemsize
    assert sizes[0].nbytes - sizes[1].nbytes == (embedding if hosted else 0)


def test_an_unpacked_matrix_counts_where_a_pass_is_widest_in_its_mlp() -> None:
    short, long = (
        [activation_bytes(TURBO, rows, BF16, mlp_rows=4_096, unpacked_bytes=size) for size in (0, 10**8)]
        for rows in (2_048, 24_976)
    )
    assert short[1] == short[0] + 10**8
    assert long[1] == long[0], "a long pass is wider in its linear layers, after the matrix is let go"


def test_an_80_gb_card_holds_the_longest_prompt_of_the_27b() -> None:
    """85.0 GB of a card less 51.3 of weights; an 80 GiB card has that much."""
    assert plan(85.0 - 51.3 - 1.0).pass_rows >= 117_200
    assert plan(140.0 - 51.3).pass_rows == LONGEST_PASS


def test_too_little_memory_is_a_plan_without_rows() -> None:
    assert plan(1.0).pass_rows == 0


def test_a_budget_without_room_for_one_state_is_refused_with_the_sizes(tiny_checkpoint) -> None:
    for budget in (0, 78_000):
        with pytest.raises(
            InvalidSettings, match=f"state_cache_bytes is {budget}, .* takes 77824 bytes and 1024"
        ):
            DecisionEngine.load(str(tiny_checkpoint), device="cpu", state_cache_bytes=budget)


def test_without_linear_layers_slots_cost_nothing_and_there_are_many() -> None:
    only_full = replace(TURBO, layer_types=("full_attention",) * 16)
    assert divide_pools(only_full, BF16, int(10e9), pass_rows=100_000, shares_state=True).slots == MAX_SLOTS


def test_a_pool_given_by_the_operator_is_divided_with_room_for_a_pass() -> None:
    found = divide_pools(TURBO, BF16, int(10e9), pass_rows=100_000, shares_state=True)
    assert found.rows >= 100_000
    assert found.slots >= 2


def test_room_for_a_vision_towers_activations_stays_free(monkeypatch) -> None:
    free, kept = 20 * 10**9, 10**9

    def planned(free_bytes: int, tower_bytes: int):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, free_bytes))
        cuda = torch.device("cuda")
        return size_pools(TURBO, BF16, cuda, None, shares_state=True, tower_bytes=tower_bytes)

    assert planned(free, kept) == planned(free - kept, 0)
    assert planned(free, kept).pass_rows < planned(free, 0).pass_rows


def test_the_memory_that_operators_are_told_of_is_what_is_planned():
    text = write_cards_doc.TARGET.read_text()
    shorter, longer = (activation_bytes(TURBO, rows, BF16, mlp_rows=MLP_ROWS) for rows in (60_000, 120_000))
    assert f"| K/V | {row_bytes(TURBO, BF16) / 2**10:g} KiB per token |" in text
    assert f"| {slot_bytes(TURBO, BF16) / 1e6:.0f} MB per state of any length |" in text
    assert f"| activations | {(longer - shorter) / 60e6:.0f} KB per token of a long pass" in text


def test_the_table_of_cards_is_what_a_worker_would_plan():
    text = write_cards_doc.TARGET.read_text()
    assert write_cards_doc.BEGIN in text
    assert write_cards_doc.document(text) == text, "run make docs"


def test_the_table_of_cards_tells_what_does_not_fit():
    turbo, float8, _, int4 = write_cards_doc.COLUMNS[:4]
    cells = {device.name: write_cards_doc.cell(device, turbo) for device in write_cards_doc.DEVICES}
    assert cells["L40S 48 GB"] == cells["RTX 5090 32 GB"] == "no"
    assert cells["H200 141 GB"].startswith("131,072, ")
    smallest = write_cards_doc.cell(
        next(each for each in write_cards_doc.DEVICES if "5090" in each.name), int4
    )
    assert smallest.endswith("states"), "four bits fit where sixteen do not"
    a100 = next(device for device in write_cards_doc.DEVICES if "A100" in device.name)
    assert write_cards_doc.cell(a100, float8) == cells["A100 80 GB"], "an A100 unpacks FP8 weights"
