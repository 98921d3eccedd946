"""Drawings of a few equal things, and what can be asked of each: colour, shape, number, place.

A drawing follows from its seed. Eight pairs of a shape and a colour, each shape and each colour once, are never
drawn for training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from demo.questions import Rng
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

# Hue, saturation and value, each from and to.
COLOURS: dict[str, tuple[tuple[float, float], ...]] = {
    "red": ((-0.02, 0.02), (0.75, 1.0), (0.65, 1.0)),
    "orange": ((0.07, 0.10), (0.8, 1.0), (0.85, 1.0)),
    "yellow": ((0.14, 0.175), (0.7, 1.0), (0.85, 1.0)),
    "green": ((0.28, 0.42), (0.6, 1.0), (0.4, 0.9)),
    "blue": ((0.56, 0.67), (0.65, 1.0), (0.5, 1.0)),
    "purple": ((0.75, 0.83), (0.5, 1.0), (0.45, 0.95)),
    "black": ((0.0, 1.0), (0.0, 0.2), (0.0, 0.12)),
    "white": ((0.0, 1.0), (0.0, 0.05), (0.95, 1.0)),
}
COUNTS = ("one", "two", "three", "four")
PLACES = ("top left", "top right", "bottom left", "bottom right")
QUESTIONS = {
    "colour": ("Which colour is it?", "What colour does the drawing show?", "Which colour do you see?"),
    "shape": ("Which shape is it?", "What does the drawing show?", "Which shape do you see?"),
    "count": (
        "How many are there?",
        "How many things does the drawing show?",
        "What is the number of things?",
    ),
    "place": ("Where is it?", "In which corner is it?", "Where in the drawing does it stand?"),
}
SMOOTH = 2  # pixels drawn for one that is kept, each way
APART = 0.42  # least difference of a thing from what is behind it, of 0 to 1

Point = tuple[float, float]


def _regular(corners: int, turn: float = 0.0) -> list[Point]:
    steps = (turn + 2 * math.pi * index / corners for index in range(corners))
    return [(math.sin(angle), -math.cos(angle)) for angle in steps]


def _star(inner: float = 0.42) -> list[Point]:
    return [(x * size, y * size) for (x, y), size in zip(_regular(10), (1.0, inner) * 5, strict=True)]


def _cross(arm: float = 0.34) -> list[Point]:
    a, b = arm, 0.95
    return [
        (-a, -b),
        (a, -b),
        (a, -a),
        (b, -a),
        (b, a),
        (a, a),
        (a, b),
        (-a, b),
        (-a, a),
        (-b, a),
        (-b, -a),
        (-a, -a),
    ]


def _heart() -> list[Point]:
    angles = (2 * math.pi * index / 60 for index in range(60))
    return [
        (math.sin(a) ** 3, -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16)
        for a in angles
    ]  # fmt: skip


SHAPES: dict[str, Callable[[], list[Point]]] = {
    "circle": lambda: _regular(60),
    "square": lambda: _regular(4, math.pi / 4),
    "triangle": lambda: _regular(3),
    "star": _star,
    "cross": _cross,
    "ring": lambda: _regular(60),
    "heart": _heart,
    "diamond": lambda: [(0.0, -1.0), (0.66, 0.0), (0.0, 1.0), (-0.66, 0.0)],
}
TURNS = {
    "square": 0.2,
    "triangle": 0.3,
    "star": 0.6,
    "cross": 0.2,
    "heart": 0.3,
    "diamond": 0.15,
}  # most, radians
WORDS = {"colour": tuple(COLOURS), "shape": tuple(SHAPES), "count": COUNTS, "place": PLACES}
HELD_OUT = frozenset(zip(SHAPES, (*COLOURS, *COLOURS)[3:], strict=False))


@dataclass(frozen=True)
class Drawing:
    """Pixels [height, width, 3] and the true words, by what is asked; a place only where there is one thing."""

    pixels: NDArray[np.uint8]
    truths: dict[str, str]


def draw(rng: Rng, width: int, height: int, *, held_out: bool | None = False) -> Drawing:
    """A drawing of a pair that is held out, or of one that is not; None draws any."""
    shape, colour = _pair(rng, held_out)
    count = int(rng.integers(1, len(COUNTS) + 1)) if rng.random() < 0.65 else 1
    ink, paper = _colours(rng, colour)
    picture = Image.new("RGB", (width * SMOOTH, height * SMOOTH), paper)
    if rng.random() < 0.3:
        _shade(picture, rng)
    radii, centres = _places(rng, width, height, count)
    for radius, (x, y) in zip(radii, centres, strict=True):
        _thing(picture, rng, shape, ink, paper, (x * SMOOTH, y * SMOOTH), radius * SMOOTH)
    picture = picture.reduce(SMOOTH)
    if rng.random() < 0.3:
        picture = picture.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.3, 1.2))))
    pixels = np.array(picture)
    if rng.random() < 0.4:
        grain = rng.normal(0, rng.uniform(1, 9), (height, width, 1))
        pixels = np.clip(pixels + grain, 0, 255).astype(np.uint8)
    truths = {"colour": colour, "shape": shape, "count": COUNTS[count - 1]}
    if count == 1 and (place := _place(centres[0], width, height)) is not None:
        truths["place"] = place
    return Drawing(pixels, truths)


def _pair(rng: Rng, held_out: bool | None) -> tuple[str, str]:
    while True:
        shape, colour = rng.choice(list(SHAPES)), rng.choice(list(COLOURS))
        if held_out is None or ((shape, colour) in HELD_OUT) == held_out:
            return str(shape), str(colour)


def _colours(rng: Rng, name: str) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """A shade of a colour, and a background that it stands out from: a light or a dark one, or any."""
    ink = _rgb(*(float(rng.uniform(*each)) for each in COLOURS[name]))
    while True:
        kind = rng.random()
        value = (
            rng.uniform(0.8, 1.0)
            if kind < 0.45
            else rng.uniform(0.0, 0.25)
            if kind < 0.65
            else rng.uniform(0.2, 1)
        )
        paper = _rgb(float(rng.random()), float(rng.uniform(0, 0.3 if kind < 0.65 else 0.7)), float(value))
        if math.dist(ink, paper) / 255 >= APART:
            return ink, paper


def _rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    shifts = ((5 + 6 * (hue % 1)) % 6, (3 + 6 * (hue % 1)) % 6, (1 + 6 * (hue % 1)) % 6)
    red, green, blue = (round(255 * value * (1 - saturation * max(0.0, min(k, 4 - k, 1)))) for k in shifts)
    return red, green, blue


def _shade(picture: Image.Image, rng: Rng) -> None:
    """A background that grows darker to one side."""
    across = Image.linear_gradient("L").rotate(90 * int(rng.integers(4))).resize(picture.size)
    depth = float(rng.uniform(0.05, 0.2))
    dark = Image.new("RGB", picture.size, tuple(int(v * (1 - depth)) for v in picture.getpixel((0, 0))))  # type: ignore[union-attr]
    picture.paste(dark, mask=across)


def _places(rng: Rng, width: int, height: int, count: int) -> tuple[list[float], list[Point]]:
    """Sizes and centres of things that lie in the picture and apart from each other."""
    side = min(width, height)
    while True:
        size = rng.uniform(0.09, 0.24 if count == 1 else 0.2 if count == 2 else 0.16) * side
        radii = [float(size * rng.uniform(0.85, 1.15)) for _ in range(count)]
        centres: list[Point] = []
        for radius in radii:
            for _ in range(30):
                x, y = (float(rng.uniform(radius + 2, whole - radius - 2)) for whole in (width, height))
                near = zip(radii, centres, strict=False)
                if all(math.dist((x, y), other) > 1.12 * (radius + r) + 3 for r, other in near):
                    centres.append((x, y))
                    break
        if len(centres) == count:
            return radii, centres


def _place(centre: Point, width: int, height: int) -> str | None:
    """The corner that a centre is in, unless it is near a middle line."""
    x, y = centre[0] / width - 0.5, centre[1] / height - 0.5
    if min(abs(x), abs(y)) < 0.08:
        return None
    return f"{'top' if y < 0 else 'bottom'} {'left' if x < 0 else 'right'}"


def _thing(
    picture: Image.Image,
    rng: Rng,
    shape: str,
    ink: tuple[int, ...],
    paper: tuple[int, ...],
    at: Point,
    radius: float,
) -> None:
    turn = float(rng.uniform(-1, 1)) * TURNS.get(shape, 0.0)
    sine, cosine = math.sin(turn), math.cos(turn)
    outline = [
        (at[0] + radius * (x * cosine - y * sine), at[1] + radius * (x * sine + y * cosine))
        for x, y in SHAPES[shape]()
    ]
    pen = ImageDraw.Draw(picture)
    pen.polygon(outline, fill=ink)
    if shape == "ring":
        hole = radius * float(rng.uniform(0.5, 0.72))
        pen.ellipse((at[0] - hole, at[1] - hole, at[0] + hole, at[1] + hole), fill=paper)
