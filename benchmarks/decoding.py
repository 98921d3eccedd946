"""How many images and videos a worker's host decodes in a second: one process decodes, one thread resizes.

    python benchmarks/decoding.py [--seconds 5]

Files are made here: smooth pictures with some noise, so that they compress like photos.
"""

import argparse
import io
import time

import av
import numpy as np
from PIL import Image

from d3serve.worker.media_decoder import MediaDecoder


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with grain."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = draw.integers(-6, 7, (height, width, 1), dtype=np.int16)
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))


def saved(image: Image.Image, kind: str, **options: int) -> bytes:
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def clip(width: int, height: int, seconds: int, rate: int = 30) -> bytes:
    """An H.264 video that pans over a photo."""
    file, wide = io.BytesIO(), np.asarray(photo(width + seconds * rate, height))
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for left in range(seconds * rate):
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(wide[:, left : left + width]), format="rgb24"
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def files() -> dict[str, tuple[str, bytes]]:
    """What is measured, by name."""
    square, camera = photo(1280, 1280), photo(4000, 3000)
    return {
        "JPEG, 1280 x 1280": ("image", saved(square, "JPEG", quality=90)),
        "PNG, 1280 x 1280": ("image", saved(square, "PNG")),
        "WebP, 1280 x 1280": ("image", saved(square, "WEBP", quality=80)),
        "JPEG, 4000 x 3000": ("image", saved(camera, "JPEG", quality=90)),
        "H.264, 11 s of 1280 x 720": ("video", clip(1280, 720, 11)),
    }


def main() -> None:
    """Print a row for each file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0, help="for each file")
    seconds = parser.parse_args().seconds
    decoder = MediaDecoder()
    print("| file | KB | tokens | ms | a second |\n|---|---|---|---|---|")
    for name, (kind, data) in files().items():
        medium = decoder.begin(kind, name, lambda data=data: data).result()  # libraries are loaded by then
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            done += 1
            decoder.begin(kind, f"{name} {done}", lambda data=data: data).result()
        each = (time.perf_counter() - began) / done
        print(
            f"| {name} | {len(data) // 1000} | {medium.pads} | {1000 * each:.0f} | {1 / each:.1f} |",
            flush=True,
        )
    decoder.close()


if __name__ == "__main__":
    main()
