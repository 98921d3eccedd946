"""What a video's container says about its first picture track: frame size, and how long its frames take.

Only what is said plainly is read; where anything is odd, nothing is known, and whoever decodes the file finds out.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

MOST_PARTS: Final = 20_000  # boxes or elements that are looked at
# Of Matroska, by number: what holds others, and what is read.
SEGMENT, INFO, TRACKS, TRACK, VIDEO = 0x18538067, 0x1549A966, 0x1654AE6B, 0xAE, 0xE0
SCALE, DURATION, TYPE, FRAME_NS, WIDTH, HEIGHT = 0x2AD7B1, 0x4489, 0x83, 0x23E383, 0xB0, 0xBA
PICTURES: Final = 1  # the type of a track of them
MILLISECOND: Final = 1_000_000  # in nanoseconds: what a time counts where nothing else is said
UNKNOWN: Final = 0  # of a number that a container does not give


@dataclass(frozen=True)
class Track:
    """A track of pictures; `seconds` and `fps` are 0 where they are not said."""

    width: int = UNKNOWN
    height: int = UNKNOWN
    seconds: float = UNKNOWN
    fps: float = UNKNOWN


class Part(NamedTuple):
    """A box or element: its name, and where its contents begin and end."""

    name: bytes | int
    start: int
    stop: int


def mp4_track(data: bytes) -> Track:
    """The first picture track of an MP4 or QuickTime file."""
    budget = _Budget()
    for track in _boxes(data, 0, len(data), budget, b"moov", b"trak"):
        media = {part.name: part for part in _boxes(data, track.start, track.stop, budget, b"mdia")}
        inside = list(_boxes(data, media[b"mdia"].start, media[b"mdia"].stop, budget)) if media else []
        found = {part.name: part for part in inside}
        handler = found.get(b"hdlr")
        if handler and data[handler.start + 8 : handler.start + 12] == b"vide":
            return _mp4_pictures(data, found, budget)
    return Track()


def _mp4_pictures(data: bytes, media: dict[bytes | int, Part], budget: "_Budget") -> Track:
    if not {b"mdhd", b"minf"} <= media.keys():
        return Track()
    minf = media[b"minf"]
    [*tables] = _boxes(data, minf.start, minf.stop, budget, b"stbl")
    inside = _boxes(data, tables[0].start, tables[0].stop, budget) if tables else iter(())
    found = {part.name: part for part in inside}
    width = height = UNKNOWN
    if sample := found.get(b"stsd"):
        width, height = _numbers(data, sample.start + 40, ">HH", sample.stop)
    long = data[media[b"mdhd"].start : media[b"mdhd"].start + 1] == b"\1"
    [scale] = _numbers(data, media[b"mdhd"].start + (20 if long else 12), ">I", media[b"mdhd"].stop)
    frames, ticks = _frames(data, found[b"stts"]) if b"stts" in found else (0, 0)
    if not scale or not frames or not ticks:
        return Track(width, height)
    return Track(width, height, ticks / scale, frames * scale / ticks)


def _frames(data: bytes, times: Part) -> tuple[int, int]:
    """How many frames a table of times has, and how long they take together."""
    [entries] = _numbers(data, times.start + 4, ">I", times.stop)
    if entries > min(MOST_PARTS, (times.stop - times.start - 8) // 8):
        return 0, 0
    pairs = list(struct.iter_unpack(">II", data[times.start + 8 : times.start + 8 + 8 * entries]))
    return sum(count for count, _ in pairs), sum(count * each for count, each in pairs)


def _boxes(data: bytes, at: int, stop: int, budget: "_Budget", *path: bytes) -> Iterator[Part]:
    """The boxes between two places; with a path, those at its end, through every box on the way."""
    while at + 8 <= stop and budget.take():
        size, name = struct.unpack_from(">I4s", data, at)
        head = 8
        if size == 1:
            [size] = _numbers(data, at + 8, ">Q", stop)
            head = 16
        end = at + size if size else stop
        if end < at + head or end > stop:
            return
        if len(path) > 1 and name == path[0]:
            yield from _boxes(data, at + head, end, budget, *path[1:])
        elif not path or path == (name,):
            yield Part(name, at + head, end)
        at = end


def matroska_track(data: bytes) -> Track:
    """The first picture track of a Matroska or WebM file."""
    budget, seconds = _Budget(), 0.0
    for part in _elements(data, 0, len(data), budget, SEGMENT):
        said = (
            {one.name: one for one in _elements(data, part.start, part.stop, budget)}
            if part.name == INFO
            else {}
        )
        if said:
            seconds = _real(data, said.get(DURATION)) * (_whole(data, said.get(SCALE)) or MILLISECOND) / 1e9
        if part.name == TRACKS:
            found = (
                _matroska_pictures(data, track, budget, seconds)
                for track in _elements(data, part.start, part.stop, budget)
                if track.name == TRACK
            )
            return next(filter(None, found), Track())
    return Track()


def _matroska_pictures(data: bytes, track: Part, budget: "_Budget", seconds: float) -> Track | None:
    """A track, if it is one of pictures; a file's length holds for it where it says how long each frame is."""
    said = {one.name: one for one in _elements(data, track.start, track.stop, budget)}
    if _whole(data, said.get(TYPE)) != PICTURES or VIDEO not in said:
        return None
    frame = {one.name: one for one in _elements(data, said[VIDEO].start, said[VIDEO].stop, budget)}
    width, height = (_whole(data, frame.get(name)) for name in (WIDTH, HEIGHT))
    each = _whole(data, said.get(FRAME_NS))
    return Track(width, height, seconds, 1e9 / each) if each else Track(width, height)


def _elements(
    data: bytes, at: int, stop: int, budget: "_Budget", inside: int | None = None
) -> Iterator[Part]:
    """The elements between two places, or in the first element of a name."""
    while at < stop and budget.take():
        name, at = _vint(data, at, keep=True)
        size, at = _vint(data, at, keep=False)
        end = stop if size < 0 else at + size
        if at < 0 or not name or end > stop:
            return
        if inside is None:
            yield Part(name, at, end)
        elif name == inside:
            yield from _elements(data, at, end, budget)
            return
        at = end


def _vint(data: bytes, at: int, *, keep: bool) -> tuple[int, int]:
    """A number whose first byte tells its length, and where it ends; -1 for one that says that it is not known."""
    if not 0 <= at < len(data) or not data[at]:
        return 0, -1
    length = 9 - data[at].bit_length()
    value = int.from_bytes(data[at : at + length])
    if keep:
        return value, at + length
    value &= (1 << 7 * length) - 1
    return (-1 if value == (1 << 7 * length) - 1 else value), at + length


def _whole(data: bytes, part: Part | None) -> int:
    return int.from_bytes(data[part.start : min(part.stop, part.start + 8)]) if part else UNKNOWN


def _real(data: bytes, part: Part | None) -> float:
    if part is None or part.stop - part.start not in {4, 8}:
        return UNKNOWN
    [value] = struct.unpack(">f" if part.stop - part.start == 4 else ">d", data[part.start : part.stop])
    return float(value) if math.isfinite(value) else UNKNOWN


def _numbers(data: bytes, at: int, kinds: str, stop: int) -> tuple[int, ...]:
    """Numbers at a place, zeros where what holds them ends before."""
    if at + struct.calcsize(kinds) > min(stop, len(data)):
        return (UNKNOWN,) * (len(kinds) - 1)
    return struct.unpack_from(kinds, data, at)


class _Budget:
    """Counts parts, so that a file of nothing but boxes costs no more than another."""

    def __init__(self) -> None:
        self._left = MOST_PARTS

    def take(self) -> bool:
        """Whether there is another one to look at."""
        self._left -= 1
        return self._left >= 0
