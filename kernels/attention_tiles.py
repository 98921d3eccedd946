"""Tile shapes of the attention kernel: which one a model takes on a device, and when a library takes its place.

Chosen by measurement and never by what a pass holds, so that two workers, and any two passes, give the same
numbers. The figures are for width 256 in BF16 with 6 query heads a key/value head on an H200;
docs/records/2026-11-29-kernel-prefix-bidir.md has the tables.
"""

from typing import NamedTuple

import torch


class TileShape(NamedTuple):
    """Launch shape of a program.

    With `overlap` the product with V of one block runs on the tensor cores while the next block's softmax runs
    beside it.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    overlap: bool

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """Shared memory of one program: the query tile, K and V once a stage, and barriers."""
        width = 1 << (head_dim - 1).bit_length()
        queries = self.block_m * (2 if itemsize > 2 and self.block_m >= 64 else 1)  # FP32: in two TF32 parts
        return (queries + 2 * self.num_stages * self.block_n) * width * itemsize + 256


# K and V are read for 21 rows of 6 heads at once. 64 x 64 reads them twice as often, and the L2 cache becomes the
# limit: 0.81 to 0.95 ms for 512 x 24,576 where this one takes 0.56 to 0.62. Over few keys 64 x 32 is a little faster
# (65 and 70 us for 16 questions of 80 over 450 + 80 keys), but a row's digits would then depend on its company.
LARGE = TileShape(128, 64, 8, 2, overlap=True)
# For devices with less shared memory, and FP32.
SMALL = (
    TileShape(64, 32, 4, 2, overlap=False),
    TileShape(32, 32, 4, 2, overlap=False),
    TileShape(16, 16, 4, 1, overlap=False),
)

# Rows of a both-ways block for which cuDNN is asked. It builds its plan anew for each length, 40 ms that hide
# behind queued work only from about here on; a layer of 16,384 rows takes it 10.2 ms, the kernel 11.4; of 65,536
# rows 161 and 177 ms; of 117,000 rows 586 and 573 ms, and a second output of 1.4 GB.
DENSE_ROWS = range(12_288, 98_304)
DENSE_TILE_ROWS = 128  # query rows of one head that a program of cuDNN's takes


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; a CPU interprets as if it were an H200."""
    if device.type != "cuda":
        return 232_448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def choose_tile(*, group: int, head_dim: int, itemsize: int, shared_bytes: int) -> TileShape:
    """The fastest shape that fits `shared_bytes`; ValueError if none does."""
    for tile in (LARGE, *SMALL):
        if group <= tile.block_m and tile.shared_bytes(head_dim, itemsize) <= shared_bytes:
            return tile
    raise ValueError(
        f"no tile for {group} heads of width {head_dim} in {itemsize}-byte numbers fits the"
        f" {shared_bytes} bytes of shared memory that this device gives a program"
    )
