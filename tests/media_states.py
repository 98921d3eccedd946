"""States that show images and videos, for the tests of several devices."""

import functools

import numpy as np

from d3serve.model.media import Medium
from d3serve.schemas.questions import NoulQuestion, ScoreQuestion

QUESTIONS = {
    "urgent": NoulQuestion(type="noul", instructions="Urgent?"),
    "mood": ScoreQuestion(type="score", criteria=["happy", {"level": "low"}, "angry"]),
}
TEXT = "the customer was charged twice for an order and the page shows it."
JSON = {"ticket": "é😀", "pages": [1.0, None, True]}


@functools.cache
def pixels(seed: int, count: int, height: int, width: int) -> np.ndarray:
    """Smooth pictures, each unlike the others: a tower must tell places and colours apart."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (count, 3, height // 16, width // 16), dtype=np.uint8)
    return coarse.repeat(16, axis=2).repeat(16, axis=3)


def image(seed: int, height: int, width: int) -> Medium:
    return Medium("image", f"image {seed}", pixels(seed, 1, height, width))


def video(seed: int, pairs: int, height: int, width: int) -> Medium:
    seconds = tuple(0.25 + 3.5 * pair for pair in range(pairs))  # written as 0.2, 3.8, 7.2, 10.8
    return Medium("video", f"video {seed}", pixels(seed, 2 * pairs, height, width), seconds)


WIDE, TALL, SQUARE = image(1, 64, 160), image(2, 192, 32), image(3, 96, 96)
CLIP, LONG_CLIP = video(4, 2, 64, 96), video(5, 4, 32, 64)
SHOWN = {
    "an image": (TEXT, (WIDE,)),
    "several images": (TEXT, (WIDE, TALL, SQUARE)),
    "an image twice": (TEXT, (TALL, TALL)),
    "a video": (TEXT, (CLIP,)),
    "videos": ("", (CLIP, LONG_CLIP)),
    "images and videos": (TEXT, (CLIP, TALL, LONG_CLIP, WIDE)),
    "media and JSON": (JSON, (SQUARE, CLIP)),
}
