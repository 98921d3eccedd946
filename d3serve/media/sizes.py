"""How large an image or a video may be, what size the model reads it at, and how many tokens that makes. Pure.

Numbers and rounding are the checkpoint runtime's: another size means other tokens, and other answers.
"""

import math
from collections.abc import Sequence
from typing import Final, Literal

from d3serve.errors import InvalidMedia

MediaKind = Literal["image", "video"]

SIDE: Final = 32  # pixels a side of a token; both sides of what is read are multiples
MAX_RATIO: Final = 200  # of the longer side to the shorter one

MAX_IMAGE_BYTES: Final = 8_000_000
MAX_IMAGE_PIXELS: Final = 16_000_000  # of the file; it is read at no more than the next line
IMAGE_AREA: Final = (65_536, 1_638_400)  # least and most pixels of an image as read

MAX_VIDEO_BYTES: Final = 32_000_000
MAX_FRAME_PIXELS: Final = 8_294_400  # of the file
MAX_SECONDS: Final = 300
FRAMES_PER_S: Final = 2.0
FRAMES: Final = (4, 32)  # least and most frames that are read, as far as there are so many
MIN_VIDEO_AREA: Final = 4_096  # pixels of all frames together, as read
MAX_FRAME_AREA: Final = 200_704  # pixels of a frame as read: 196 tokens for each pair
MAX_VIDEO_TOKENS: Final = 16_384  # of the pixels of all videos of a job, without times and markers

# Memory that a file, and then each of its frames, goes through on its way to the process that decodes and back.
SHARED_BYTES: Final = max(3 * MAX_IMAGE_PIXELS, 3 * MAX_FRAME_PIXELS, MAX_VIDEO_BYTES)

FPS_RANGE: Final = (0.1, 1000.0)
UNKNOWN_FPS: Final = 24.0  # stands in where a file says nothing, or nothing plausible

MARKERS: Final = 2  # tokens around an image, a pair of frames, and a video
MAX_TIME_TOKENS: Final = 8  # of "<123.4 seconds>"
MAX_PAIRS: Final = FRAMES[1] // 2
MOST_VIDEO_TOKENS: Final = MARKERS + MAX_PAIRS * (MARKERS + MAX_TIME_TOKENS + MAX_FRAME_AREA // SIDE**2)


def image_size(width: int, height: int) -> tuple[int, int]:
    """The height and width at which an image is read.

    Raises:
        InvalidMedia: one side is more than 200 times the other.
    """
    return _fit(width, height, 1, IMAGE_AREA)


def frame_size(frames: int, width: int, height: int) -> tuple[int, int]:
    """The height and width at which `frames` frames of a video are read; the count is even.

    Raises:
        InvalidMedia: one side is more than 200 times the other.
    """
    if height < SIDE or width < SIDE:
        scale = max(SIDE / height, SIDE / width)
        height, width = int(height * scale), int(width * scale)
    return _fit(width, height, frames, (MIN_VIDEO_AREA, MAX_FRAME_AREA * frames))


def image_tokens(width: int, height: int) -> int:
    """The tokens of an image, markers included. Raises like `image_size`."""
    rows, columns = image_size(width, height)
    return MARKERS + rows * columns // SIDE**2


def sampled(total: int, fps: float) -> list[int]:
    """The numbers of the frames that are read of a video: two a second, spread evenly from the first to the last."""
    count = min(max(int(total / fps * FRAMES_PER_S), FRAMES[0]), FRAMES[1], total)
    step = (total - 1) / max(1, count - 1)
    return [*(round(number * step) for number in range(count - 1)), total - 1]


def pair_times(times: Sequence[float]) -> tuple[float, ...]:
    """The time of each pair of frames, the mean of both, in seconds."""
    return tuple((first + second) / 2 for first, second in zip(times[::2], times[1::2], strict=True))


def plausible_fps(fps: float) -> float:
    """`fps`, or the stand-in for what no camera writes."""
    return fps if FPS_RANGE[0] <= fps <= FPS_RANGE[1] else UNKNOWN_FPS


def _fit(width: int, height: int, frames: int, area: tuple[int, int]) -> tuple[int, int]:
    least, most = area
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidMedia(
            f"is {width:,} x {height:,} pixels; one side may be {MAX_RATIO} times the other, not more"
        )
    # Python rounds half to even, as the runtime does: 80 pixels become 64, and 16 none.
    rows, columns = round(height / SIDE) * SIDE, round(width / SIDE) * SIDE
    if frames * rows * columns > most:
        shrink = math.sqrt(frames * height * width / most)
        rows = max(SIDE, math.floor(height / shrink / SIDE) * SIDE)
        columns = max(SIDE, math.floor(width / shrink / SIDE) * SIDE)
    elif frames * rows * columns < least:
        grow = math.sqrt(least / (frames * height * width))
        rows = math.ceil(height * grow / SIDE) * SIDE
        columns = math.ceil(width * grow / SIDE) * SIDE
    return rows, columns
