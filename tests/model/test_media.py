"""What a medium may be, and how its frames are cut into rows."""

import hashlib

import numpy as np
import pytest
import torch
from oracle import patch_rows_by_hand

from d3serve.model.media import Medium
from d3serve.model.vision import patch_rows

# Published with the checkpoint family's other runtime, for the picture below.
ROWS_SHA256 = "6c77827d418e10a4a4b15eeb95f32ec703815c693d1ca92d007ba02a466e71f3"


def frames(count: int, height: int = 64, width: int = 96) -> np.ndarray:
    return np.zeros((count, 3, height, width), dtype=np.uint8)


def test_an_image_is_cut_into_the_published_rows():
    y, x, c = np.ogrid[:224, :320, :3]
    picture = ((7 * x + 3 * y + 50 * c) % 256).astype(np.uint8).transpose(2, 0, 1)[None]
    medium = Medium("image", "0" * 64, np.ascontiguousarray(picture))
    rows = patch_rows(torch.from_numpy(medium.frames))
    assert (medium.grid, medium.pads, rows.shape) == ((1, 14, 20), 70, (280, 1536))
    assert hashlib.sha256(rows.numpy().tobytes()).hexdigest() == ROWS_SHA256


def test_a_video_is_cut_pair_by_pair_block_by_block():
    pixels = np.random.default_rng(1).integers(0, 256, (6, 3, 64, 96), dtype=np.uint8)
    medium = Medium("video", "0" * 64, pixels, seconds=(0.25, 1.25, 2.25))
    assert (medium.grid, medium.pads) == ((3, 4, 6), 18)
    assert torch.equal(patch_rows(torch.from_numpy(pixels)), torch.from_numpy(patch_rows_by_hand(pixels)))


@pytest.mark.parametrize(
    ("kind", "held", "seconds"),
    [
        ("image", frames(2), ()),
        ("image", frames(1), (0.5,)),
        ("image", frames(1, height=48), ()),
        ("image", frames(0), ()),
        ("image", frames(1).astype(np.float32), ()),
        ("image", frames(1)[0], ()),
        ("video", frames(3), (0.5,)),
        ("video", frames(4), (0.5,)),
        ("video", frames(0), ()),
    ],
)
def test_what_no_preparation_gives_is_refused(kind, held, seconds):
    with pytest.raises(ValueError, match="frames"):
        Medium(kind, "0" * 64, held, seconds)


def test_a_file_read_as_another_kind_is_another_medium():
    image, video = Medium("image", "a", frames(1)), Medium("video", "a", frames(2), (0.0,))
    assert image.identity != video.identity
