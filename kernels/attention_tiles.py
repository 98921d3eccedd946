"""Tile shapes of the attention kernel: which one a model takes on a card, and when a library takes its place.

Chosen by the kind of card and never by what a pass holds, so that two workers, and any two passes, give the same
numbers. Those of Hopper are measured: figures are for width 256 in BF16 with 6 query heads a key/value head on an
H200; docs/records/2026-11-29-kernel-prefix-bidir.md has the tables. Those of other cards are computed: the largest
that compile within the card's shared memory and registers.
"""

from typing import NamedTuple

from d3serve.kernels.cards import Card


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

    def shared_bytes(self, head_dim: int, itemsize: int, card: Card) -> int:
        """Most shared memory of one program on `card`.

        Where the tensor cores read it, it holds the query tile, K and V once a stage, and barriers. Elsewhere
        registers feed them: K and V stay in flight for a stage less, weights pass through, and FP32 is in two
        TF32 parts.
        """
        width = 1 << (head_dim - 1).bit_length()
        if card.feeds_from_shared:
            queries = self.block_m * (
                2 if itemsize > 2 and self.block_m >= 64 else 1
            )  # FP32: in two TF32 parts
            return (queries + 2 * self.num_stages * self.block_n) * width * itemsize + 1024
        keys = max(1, 2 * (self.num_stages - 1)) * self.block_n
        parts = 2 if itemsize > 2 else 1
        return ((self.block_m + keys) * width + self.block_m * self.block_n) * itemsize * parts + 1024


# K and V are read for 21 rows of 6 heads at once. 64 x 64 reads them twice as often, and the L2 cache becomes the
# limit: 0.81 to 0.95 ms for 512 x 24,576 where this one takes 0.56 to 0.62. Over few keys 64 x 32 is a little faster
# (65 and 70 us for 16 questions of 80 over 450 + 80 keys), but a row's digits would then depend on its company.
LARGE = TileShape(128, 64, 8, 2, overlap=True)
# Of Hopper in FP32, where LARGE does not fit.
SMALL = (
    TileShape(64, 32, 4, 2, overlap=False),
    TileShape(32, 32, 4, 2, overlap=False),
    TileShape(16, 16, 4, 1, overlap=False),
)
# Of cards whose tensor cores are fed from registers. Since Triton 3.7 the first one spills nothing; with 3.6 it spills
# 336 bytes a thread on an A100, where four warps spill 2 KB, and whatever is larger more. The others are for FP32.
ELSEWHERE = (
    TileShape(64, 32, 8, 2, overlap=False),
    TileShape(32, 32, 4, 1, overlap=False),
    TileShape(16, 16, 4, 1, overlap=False),
)

# Rows of a both-ways block for which cuDNN is asked. It builds its plan anew for each length, 40 ms that hide
# behind queued work only from about here on; a layer of 16,384 rows takes it 10.2 ms, the kernel 11.4; of 65,536
# rows 161 and 177 ms; of 117,000 rows 586 and 573 ms, and a second output of 1.4 GB.
DENSE_ROWS = range(12_288, 98_304)
DENSE_TILE_ROWS = 128  # query rows of one head that a program of a library takes
# The same of FlashAttention-3, which builds no plans: 4,096 rows take it 0.69 ms, the kernel 0.77, and 2,048 both 0.26.
FLASH3_ROWS = range(4096, 2**31)
FLOAT8_ROWS = range(32_768, 2**31)  # of these in E4M3: 24,576 rows take 17.5 ms, and 19.6 in BF16


def choose_tile(*, group: int, head_dim: int, itemsize: int, card: Card) -> TileShape:
    """The first shape of the card's table that fits it; ValueError if none does."""
    table = (LARGE, *SMALL) if card.feeds_from_shared else ELSEWHERE
    for tile in table:
        if group <= tile.block_m and tile.shared_bytes(head_dim, itemsize, card) <= card.shared_bytes:
            return tile
    raise ValueError(
        f"no tile for {group} heads of width {head_dim} in {itemsize}-byte numbers fits the"
        f" {card.shared_bytes} bytes of shared memory that this device gives a program"
    )
