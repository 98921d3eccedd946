"""Write the table of cards in docs/operations.md from what a worker would plan there; a test compares the two.

PYTHONPATH=tests python tools/write_cards_doc.py
"""

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from published import SIZES, Published, geometry_of

from d3serve.kernels.cards import Card
from d3serve.model.capacity import LONGEST_PASS, plan_memory
from d3serve.model.checkpoint import quantizable
from d3serve.model.config import CODES, Geometry
from d3serve.model.vision import tower_activation_bytes
from d3serve.model.vision_config import VisionGeometry, VisionTokens
from d3serve.model.weights import PLAIN, Allocator, Kept

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
MOST_PLAIN = 950_000_000  # weights that an INT4 package leaves in BF16
BIG = "d3, d3-turbo, d3-ultra"


class Column(NamedTuple):
    """A checkpoint in a format."""

    title: str
    size: str
    shares_state: bool
    format: Literal["plain", "float8", "float8-all", "int4"] = "plain"


COLUMNS = (
    Column("d3-turbo, d3-ultra", BIG, shares_state=True),
    Column("the same, FP8", BIG, shares_state=True, format="float8"),
    Column("the same, `fp8-all`", BIG, shares_state=True, format="float8-all"),
    Column("the same, INT4", BIG, shares_state=True, format="int4"),
    Column("d3", BIG, shares_state=False),
    Column("d3, FP8", BIG, shares_state=False, format="float8"),
    Column("d3, INT4", BIG, shares_state=False, format="int4"),
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
    geometry, held = geometry_of(size), kept(geometry_of(size), column.format, device.card)
    tower = tower_activation_bytes(vision_of(size), BF16)
    weights, unpacked = weight_bytes(size, held)
    free = int(device.memory_gib * GIB) - CONTEXT_BYTES - weights - tower
    plan = plan_memory(geometry, BF16, free, shares_state=column.shares_state, unpacked_bytes=unpacked)
    if not plan.pass_rows:
        return "no"
    states = f", {plan.slots - plan.beside_slots} states" if column.shares_state else ""
    return f"{min(plan.pass_rows, plan.rows - plan.beside_rows, LONGEST_PASS):,}{states}"


def kept(geometry: Geometry, form: str, card: Card) -> Kept:
    """What stays quantized on a card, of a package in a format."""
    if form.startswith("float8") and card.has_float8:
        return Kept(float8=quantizable(geometry, inputs=form == "float8-all"))
    if form == "int4":
        return Kept(int4=four_bits(geometry), group=128)
    return PLAIN


def four_bits(geometry: Geometry, *, plain: int = MOST_PLAIN) -> set[str]:
    """Name the matrices of a published INT4 package: all but the gates of linear layers, and some that it left plain.

    d3-W4A16-AWQ leaves none; d3-turbo-INT4 about 0.3 and d3-ultra-INT4 0.95 billion weights, its cards do not say
    which: the last layers' MLPs stand for them, as many as hold `plain` weights.
    """
    allocator = Allocator(geometry, torch.device("meta"), BF16)
    allocator.weights(CODES)
    gates = ("in_proj_a.weight", "in_proj_b.weight")
    names = [name for name in allocator.targets if name.endswith("_proj.weight") or "in_proj_" in name]
    packed = {name: allocator.targets[name].numel() for name in names if not name.endswith(gates)}
    for name in reversed([name for name in packed if ".mlp." in name]):
        if plain <= 0:
            break
        plain -= packed.pop(name)
    return set(packed)


def weight_bytes(size: Published, held: Kept) -> tuple[int, int]:
    """What the weights take on a device, those of the vision tower too; and the largest INT4 matrix when unpacked."""
    geometry = geometry_of(size)
    allocator = Allocator(geometry, torch.device("meta"), BF16, held)
    weights = allocator.weights(CODES)
    plain = Allocator(geometry, torch.device("meta"), BF16)
    plain.weights(CODES)
    parameters = sum(each.numel() for each in plain.targets.values())
    vision = size.loaded - parameters - CODES * size.hidden
    return allocator.nbytes + weights.readout.nbytes + vision * BF16.itemsize, weights.unpacked_bytes


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
