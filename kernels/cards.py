"""What there is to know of a card. Tile tables and `model.placement` ask here; nothing else asks which card it is."""

from functools import cache
from typing import NamedTuple

import torch


class Card(NamedTuple):
    """A kind of GPU, as far as a choice depends on it."""

    capability: tuple[int, int]
    shared_bytes: int  # shared memory that a program may take
    processors: int  # streaming multiprocessors

    @property
    def is_hopper(self) -> bool:
        """Whether it is what tiles were chosen on by measurement; those of other cards are computed."""
        return self.capability == (9, 0)

    @property
    def feeds_from_shared(self) -> bool:
        """Whether its tensor cores read their operands from shared memory: Hopper's and data-centre Blackwell's."""
        return self.capability[0] in {9, 10}

    @property
    def has_float8(self) -> bool:
        """Whether its tensor cores multiply E4M3: since Ada."""
        return self.capability >= (8, 9)

    @property
    def widest_cudnn_head(self) -> int:
        """Width of a head up to which cuDNN's attention is ours to call.

        PyTorch takes 256 to cuDNN on these two alone: https://github.com/pytorch/pytorch/issues/181379.
        """
        return 256 if self.capability in {(9, 0), (10, 0)} else 0


INTERPRETER = Card((9, 0), 232_448, 1)  # a CPU interprets kernels as if it were an H200


@cache
def card(device: torch.device) -> Card:
    """The card at `device`."""
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    return Card((found.major, found.minor), found.shared_memory_per_block_optin, found.multi_processor_count)
