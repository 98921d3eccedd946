"""Medium: one image or video of a state, decoded and resized; where its tokens stand, and what tells it from others.

Whoever decodes makes these; nothing here opens a file.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MediaKind = Literal["image", "video"]

PATCH = 16  # pixels a side of a patch
MERGE = 2  # patches a side of what becomes one token
TEMPORAL = 2  # frames of a patch; an image stands still in both
SIDE = PATCH * MERGE  # pixels: both sides of a frame are multiples
CHANNELS = 3
# How a file becomes frames: decoder, sampling, sizes, resizing. It is part of a state's identity: change it with them.
PREPARATION = "d3-media-1"


@dataclass(frozen=True, eq=False)
class Medium:
    """One image or video as the vision tower reads it.

    `digest` is the SHA-256 of the encoded file, in hex. `frames` are RGB, [T, 3, height, width] uint8, already
    resized: one of an image, an even number of a video. `seconds` holds, for each pair of a video's frames, the mean
    of their times; an image has none.
    """

    kind: MediaKind
    digest: str
    frames: NDArray[np.uint8] = field(repr=False)
    seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no preparation gives.

        Raises:
            ValueError: a shape or a count is not as described.
        """
        if self.frames.dtype != np.uint8 or self.frames.ndim != 4 or self.frames.shape[1] != CHANNELS:
            raise ValueError(
                f"frames are {self.frames.dtype} {self.frames.shape}; expected uint8 [T, 3, height, width]"
            )
        count, _, height, width = self.frames.shape
        if not count or height % SIDE or width % SIDE or not height * width:
            raise ValueError(f"{count} frames of {width} x {height} pixels; sides are multiples of {SIDE}")
        if self.kind == "image" and (count > 1 or self.seconds):
            raise ValueError(f"an image has {count} frames and {len(self.seconds)} times")
        if self.kind == "video" and count != TEMPORAL * len(self.seconds):
            raise ValueError(f"a video has {count} frames and {len(self.seconds)} times of pairs")

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches: frame pairs, rows, columns."""
        count, _, height, width = self.frames.shape
        return max(1, count // TEMPORAL), height // PATCH, width // PATCH

    @property
    def pads(self) -> int:
        """Tokens that its pixels become, without the markers and times around them."""
        pairs, rows, columns = self.grid
        return pairs * rows * columns // MERGE**2

    @property
    def identity(self) -> str:
        """What two media must share to be read alike: the file, what it is read as, and how it is prepared."""
        return f"{self.kind}:{self.digest}:{PREPARATION}"
