"""Rows, grids and times are those of the checkpoint's runtime, bit for bit, on files of every kind."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from media_files import images, noise, videos
from PIL import Image

from d3serve.media.headers import read_header
from d3serve.media.sizes import frame_size, image_size, image_tokens, sampled
from d3serve.model.resize import resized
from d3serve.model.vision import patch_rows
from d3serve.worker.media_decoder import MediaDecoder

REFERENCE = Path(__file__).parent / "reference"
IMAGES, VIDEOS = images(), videos()
FILES = [("image", name) for name in IMAGES] + [("video", name) for name in VIDEOS]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    for kind, files in (("image", IMAGES), ("video", VIDEOS)):
        (folder / kind).mkdir()
        for name, data in files.items():
            (folder / kind / name).write_bytes(data)
    environ = {**os.environ, "PYTHONPATH": str(REFERENCE), "HF_HUB_OFFLINE": "1"}
    script = [sys.executable, REFERENCE / "prepare.py", folder, folder / "out.npz"]
    subprocess.run(script, env=environ, check=True, capture_output=True)
    with np.load(folder / "out.npz") as found:
        return dict(found)


@pytest.fixture(scope="module")
def decoder():
    decoder = MediaDecoder()
    yield decoder
    decoder.close()


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_file_becomes_the_rows_of_the_reference(expected, decoder, kind, name):
    data = {"image": IMAGES, "video": VIDEOS}[kind][name]
    medium = decoder.begin(kind, name, lambda: data).result(timeout=200)
    assert medium.grid == tuple(expected[f"{name}/grid"])
    rows = patch_rows(torch.from_numpy(medium.frames)).numpy()
    assert np.array_equal(rows, expected[f"{name}/rows"])
    if kind == "video":
        assert medium.seconds == tuple(expected[f"{name}/seconds"])
    else:
        assert read_header(data, "image").most_tokens == medium.pads + 2


# What torchvision 0.28.0 itself gave, SHA-256 of the rows: a stand-in in `reference` only calls torch.
WITH_TORCHVISION = {
    "png-123x77": "cdde6a7bdef963033e219563d587eb87a8913b3eb1f1c22daca9d77bb64e0e68",
    "png-1301x1277": "26c55431cfedb4e5afd391ec3f0e701c0cde096e22a605d29e3126532e3357c5",
    "png-2600x700": "fcd2a60fa934b7d4a4e5a12f320dacde5707b63e8374e2851f9d737e50f87868",
    "png-10x1999": "5fb23ee23e0d26ab506c00685aead3e3bae4639a340bb38550c12907657b0455",
}


@pytest.mark.parametrize("name", WITH_TORCHVISION)
def test_an_image_becomes_the_rows_that_torchvision_made_of_it(decoder, name):
    medium = decoder.begin("image", name, lambda: IMAGES[name]).result(timeout=200)
    rows = patch_rows(torch.from_numpy(medium.frames)).numpy()
    assert hashlib.sha256(rows.tobytes()).hexdigest() == WITH_TORCHVISION[name]


def test_another_resize_would_be_seen():
    """Pillow's is the nearest other one: a few values in a thousand."""
    pixels = noise(300, 500)
    height, width = image_size(500, 300)
    near = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    assert not np.array_equal(near.transpose(2, 0, 1), resized(pixels, height, width))


@pytest.mark.parametrize(
    ("width", "height", "rows", "columns"),
    [
        (1, 1, 256, 256), (10, 1999, 3648, 32), (1600, 1200, 1088, 1472), (4000, 3000, 1088, 1472),
        (1280, 1280, 1280, 1280), (3840, 2160, 960, 1696), (16_000, 1000, 320, 5120), (32, 4800, 4800, 32),
    ],
)  # fmt: skip
def test_an_image_is_read_at_the_size_of_the_reference(width, height, rows, columns):
    assert image_size(width, height) == (rows, columns)
    assert image_tokens(width, height) == 2 + rows * columns // 1024


@pytest.mark.parametrize(
    ("width", "height", "rows", "columns"),
    [(320, 240, 256, 320), (1920, 1080, 320, 576), (640, 360, 320, 576), (20, 20, 32, 32), (1080, 1920, 576, 320)],
)  # fmt: skip
def test_frames_are_read_at_the_size_of_the_reference(width, height, rows, columns):
    assert {frame_size(count, width, height) for count in range(4, 33, 2)} == {(rows, columns)}


@pytest.mark.parametrize("fps", [0.1, 0.9, 2, 10, 23.976, 29.97, 120, 1000])
def test_frames_are_chosen_as_numpy_spaces_them(fps):
    for total in [*range(1, 200), 901, 9000, 35_964]:
        count = min(max(int(total / fps * 2), 4), 32, total)
        assert sampled(total, fps) == np.linspace(0, total - 1, count).round().astype(int).tolist()
