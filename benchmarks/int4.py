"""Products with four-bit weights at the 27B's sizes: packed in registers, unpacked in memory, BF16, and a library's.

    python benchmarks/int4.py [--out DIR] [--tiles] [--tiny]

Each row of the table is one matrix at the rows of one pass; a small one may stay in the cache between its repeats, so
a whole pass (`formats.py --format int4`) has the last word. Right comes first: errors against FP64 products of the
unpacked weights, and whether both ways give the same bits, among which `kernels/int4.py` may choose only if they do.
`humming-kernels`, where it is installed, multiplies the same values, zero points and scales in its order of sums that
does not depend on the rows beside (`use_batch_invariant`). `--tiles` times a one-question pass with each tile alone.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ceilings
import torch
import torch.nn.functional as F
from torch import Tensor

from d3serve.kernels import int4
from d3serve.kernels.matrix import Int4Matrix, int4_values, quantize_int4, sum_rows_alike, unpack_int4

PRODUCTS = {
    "qkv": (14_336, 5_120),
    "inputs": (16_384, 5_120),
    "out": (5_120, 6_144),
    "gate_up": (34_816, 5_120),
    "down": (5_120, 17_408),
}
LAYERS = {"qkv": 16, "inputs": 48, "out": 64, "gate_up": 64, "down": 64}
PASSES = (1, 20, 90, 250, 512, 1_430, 8_192)
SCHEME = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "type": "int", "num_bits": 4,
    "strategy": "group", "group_size": 128, "symmetric": False,
}  # fmt: skip
Product = Callable[[Tensor], Tensor]


def packed_words(values: Tensor) -> Tensor:
    """Pack four-bit values [rows, columns] into int32 words along the columns, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=values.device)
    words = (values.long().unflatten(1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def humming_product(weight: Int4Matrix) -> Product:
    """The library's product of the same weight, from the parts that a package stores."""
    from humming.layer import HummingLayer

    rows, columns = weight.shape
    q = int4_values(weight).transpose(0, 1).flatten(1)
    parts = {
        "weight_packed": packed_words(q),
        "weight_scale": weight.scale.T.contiguous(),
        "weight_zero_point": packed_words(weight.zero).T.contiguous(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    layer = HummingLayer(rows, columns, dict(SCHEME), torch_dtype=torch.bfloat16).cuda()
    layer.load_from_tensors(parts)
    layer.transform()
    return partial(layer, compute_config={"use_batch_invariant": True})


def error(ours: Tensor, wanted: Tensor) -> float:
    """The relative error of a product."""
    return float((ours.double() - wanted).norm() / wanted.norm())


def measure(name: str, rows: int, columns: int) -> list[dict[str, Any]]:
    """One matrix at every pass."""
    drawn = torch.randn(rows, columns, device="cuda") / columns**0.5
    weight = quantize_int4(drawn)
    plain = int4.unpack(weight, torch.bfloat16)
    products: dict[str, Product] = {
        "packed": lambda x: int4.multiply_packed(x, weight),
        "unpacked": lambda x: F.linear(x, int4.unpack(weight, x.dtype)),
        "bf16": lambda x: F.linear(x, plain),
    }
    if importlib.util.find_spec("humming"):
        products["humming"] = humming_product(weight)
    exact = unpack_int4(weight).double()
    x = torch.randn(PASSES[-1], columns, device="cuda").bfloat16()
    whole = {kind: product(x) for kind, product in products.items()}
    found = []
    for count in PASSES:
        few = x[:count]
        row: dict[str, Any] = {"matrix": name, "rows": count}
        wanted = few[:512].double() @ exact.T
        for kind, product in products.items():
            ours = product(few)
            row[f"{kind} error"] = error(ours[:512], wanted)
            row[f"{kind} alone = among"] = torch.equal(ours, whole[kind][:count])
            row[f"{kind} ms"] = ceilings.timed_ms(partial(product, few), repeats=20, warmup=3)
        row["packed = bf16"] = torch.equal(products["packed"](few), whole["bf16"][:count])
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def try_tiles(shapes: dict[str, tuple[int, int]], rows: int = 250) -> None:
    """All layers' packed products of a pass, by each tile of Hopper's kernel alone."""
    from d3serve.kernels import int4_hopper

    weights = {name: quantize_int4(torch.randn(shape, device="cuda")) for name, shape in shapes.items()}
    chosen = int4_hopper.TILES
    for tile in chosen:
        int4_hopper.TILES, took = (tile,), {}
        int4_hopper.tiles_of.cache_clear()
        for name, weight in weights.items():
            x = torch.randn(rows, weight.shape[1], device="cuda").bfloat16()
            took[name] = ceilings.timed_ms(partial(int4.multiply_packed, x, weight), repeats=20, warmup=3)
        total = sum(LAYERS[name] * ms for name, ms in took.items())
        print(f"{tile}: {total:.2f} ms a pass; {json.dumps(took)}", flush=True)
    int4_hopper.TILES = chosen
    int4_hopper.tiles_of.cache_clear()


def per_pass(found: list[dict[str, Any]]) -> str:
    """All layers' products of a pass, as markdown."""
    kinds = [key.removesuffix(" ms") for key in found[0] if key.endswith(" ms")]
    lines = [f"| rows | {' | '.join(kinds)} |", f"|{' --- |' * (len(kinds) + 1)}"]
    for count in PASSES:
        rows = [row for row in found if row["rows"] == count]
        sums = [sum(LAYERS[row["matrix"]] * row[f"{kind} ms"] for row in rows) for kind in kinds]
        lines.append(f"| {count:,} | {' | '.join(f'{ms:.2f} ms' for ms in sums)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--tiny", action="store_true", help="a sixteenth of each size, to try the script itself"
    )
    parser.add_argument("--tiles", action="store_true", help="time each of Hopper's tiles alone, too")
    options = parser.parse_args()
    sum_rows_alike()
    part = 16 if options.tiny else 1
    shapes = {
        name: (rows // part, -(-columns // part // 128) * 128) for name, (rows, columns) in PRODUCTS.items()
    }
    if options.tiles:
        try_tiles(shapes)
    found = [row for name, shape in shapes.items() for row in measure(name, *shape)]
    print(per_pass(found))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "int4.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
