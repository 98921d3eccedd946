"""Write the table of cards in docs/operations.md from what a worker would plan there; a test compares the two.

PYTHONPATH=tests python tools/write_cards_doc.py
"""

from pathlib import Path
from typing import NamedTuple

import torch
from published import SIZES, Published, geometry_of

from d3serve.kernels.cards import Card
from d3serve.model.capacity import LONGEST_PASS, MLP_ROWS, plan_memory
from d3serve.model.checkpoint import quantizable
from d3serve.model.config import CODES
from d3serve.model.vision import tower_activation_bytes
from d3serve.model.vision_config import VisionGeometry, VisionTokens
from d3serve.model.weights import Allocator

TARGET = Path(__file__).parents[1] / "docs" / "operations.md"
BEGIN, END = "<!-- written by make docs: begin -->\n", "<!-- written by make docs: end -->\n"
GIB = 2**30
CONTEXT_BYTES = GIB // 2  # what the driver and the libraries take of a device
BF16 = torch.bfloat16


class Device(NamedTuple):
    """A product: its kind, and the memory that the driver reports."""

    name: str
    memory_gib: float
    card: Card
    measured: bool = False


ADA, AMPERE = Card((8, 9), 101_376, 0), Card((8, 6), 101_376, 0)
HOPPER, BLACKWELL = Card((9, 0), 232_448, 0), Card((12, 0), 101_376, 0)
DEVICES = (
    Device("H200 141 GB", 139.8, HOPPER, measured=True),
    Device("H100 80 GB", 79.2, HOPPER),
    Device("B200 180 GB", 178.4, Card((10, 0), 232_448, 0)),
    Device("RTX PRO 6000 96 GB", 95.0, BLACKWELL),
    Device("RTX 5090 32 GB", 31.4, BLACKWELL),
    Device("A100 80 GB", 79.2, Card((8, 0), 166_912, 0)),
    Device("L40S 48 GB", 44.4, ADA),
    Device("RTX 4090 24 GB", 23.5, ADA),
    Device("L4 24 GB", 22.0, ADA),
    Device("A10 24 GB", 22.0, AMPERE),
)
BIG = "d3, d3-turbo, d3-ultra"


class Column(NamedTuple):
    """A checkpoint in a format."""

    title: str
    size: str
    shares_state: bool
    float8: bool = False
    inputs: bool = False  # those of linear layers in FP8 too


COLUMNS = (
    Column("d3-turbo, d3-ultra (BF16, INT4)", BIG, shares_state=True),
    Column("the same, FP8", BIG, shares_state=True, float8=True),
    Column("the same, `fp8-all`", BIG, shares_state=True, float8=True, inputs=True),
    Column("d3 (BF16, INT4)", BIG, shares_state=False),
    Column("d3, FP8", BIG, shares_state=False, float8=True),
    Column("d3-flash", "d3-flash", shares_state=False),
    Column("d3-mini", "d3-mini", shares_state=False),
    Column("d3-nano", "d3-nano", shares_state=False),
    Column("d3-lite", "d3-lite", shares_state=False),
)


def render() -> str:
    """Write out the table, one row for each card."""
    titles = ["card", "how", *(column.title for column in COLUMNS)]
    rows = [[device.name, how(device), *(cell(device, column) for column in COLUMNS)] for device in DEVICES]
    lines = [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]
    return "\n".join(lines) + "\n"


def how(device: Device) -> str:
    """By which kernels, and whether anything was measured there."""
    card, known = device.card, "measured" if device.measured else "computed"
    rule = "our rule" if card.is_hopper else "fla's rule"
    dense = "cuDNN" if card.widest_cudnn_head else "our attention alone"
    return f"sm_{card.capability[0]}{card.capability[1]}; {rule}; {dense}; {known}"


def cell(device: Device, column: Column) -> str:
    """Longest prompt in tokens, and the states kept beside it where states are shared."""
    size = SIZES[column.size]
    geometry, float8 = geometry_of(size), column.float8 and device.card.has_float8
    weights = weight_bytes(size, float8=float8, inputs=column.inputs)
    tower = tower_activation_bytes(vision_of(size), BF16)
    free = int(device.memory_gib * GIB) - CONTEXT_BYTES - weights - tower
    plan = plan_memory(geometry, BF16, free, mlp_rows=MLP_ROWS, shares_state=column.shares_state)
    if not plan.pass_rows:
        return "no"
    states = f", {plan.slots - plan.beside_slots} states" if column.shares_state else ""
    return f"{min(plan.pass_rows, plan.rows - plan.beside_rows, LONGEST_PASS):,}{states}"


def weight_bytes(size: Published, *, float8: bool, inputs: bool = False) -> int:
    """What the weights take on a device, those of the vision tower too."""
    geometry = geometry_of(size)
    names = quantizable(geometry, inputs=inputs) if float8 else frozenset()
    allocator = Allocator(geometry, torch.device("meta"), BF16, names)
    readout = allocator.weights(CODES).readout
    text = sum(each.nbytes for each in allocator.targets.values())
    plain = Allocator(geometry, torch.device("meta"), BF16)
    plain.weights(CODES)
    parameters = sum(each.numel() for each in plain.targets.values())
    vision = size.loaded - parameters - CODES * size.hidden
    return text + readout.nbytes + vision * BF16.itemsize


def vision_of(size: Published) -> VisionGeometry:
    """The tower of a checkpoint, as far as memory depends on it."""
    depth, hidden, ffn, heads = size.vision
    return VisionGeometry(
        depth=depth, hidden=hidden, ffn=ffn, heads=heads, side=48, out_hidden=size.hidden,
        rope_theta=1e4, sections=(11, 11, 10), tokens=VisionTokens(1, 2, 3, 4), kinds=("image",),
    )  # fmt: skip


def document(text: str) -> str:
    """Put the table where it stands in a document."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + render() + END + rest.partition(END)[2]


if __name__ == "__main__":
    TARGET.write_text(document(TARGET.read_text()))
