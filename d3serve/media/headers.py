"""What a file says of itself: its format, the size of an image or of frames, how long a video is. Nothing is decoded.

The bytes decide, never a name or a declared type. Whoever decodes the file checks all of it again.
"""

from dataclasses import dataclass
from typing import Final

from d3serve.errors import InvalidMedia
from d3serve.media.containers import Track, matroska_track, mp4_track
from d3serve.media.sizes import (
    FPS_RANGE,
    FRAMES,
    MAX_FRAME_PIXELS,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_SECONDS,
    MAX_VIDEO_BYTES,
    MOST_VIDEO_TOKENS,
    MediaKind,
    frame_size,
    image_tokens,
)

IMAGE_FORMATS: Final = "PNG, JPEG or WebP"
VIDEO_FORMATS: Final = "MP4, QuickTime, WebM or Matroska"
PNG: Final = b"\x89PNG\r\n\x1a\n"
EBML: Final = b"\x1a\x45\xdf\xa3"
MAX_JPEG_SEGMENTS: Final = 4096  # in front of the picture; a camera writes a dozen, a long colour profile 255
# Frame headers: all of 0xC0 to 0xCF but tables and extensions.
JPEG_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
JPEG_LONE: Final = frozenset({0x00, 0x01, *range(0xD0, 0xD9)})  # markers without a segment
JPEG_PICTURE: Final = frozenset({0xD9, 0xDA})  # here the header has ended
NOT_READ: Final = ("AVIF", "HEIC")
# Brands of images in MP4's clothes.
STILLS: Final = (b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"avif", b"avis")


@dataclass(frozen=True)
class Header:
    """A file by its beginning; the size of an image in pixels, 0 of a video."""

    kind: MediaKind
    format: str
    width: int = 0
    height: int = 0

    @property
    def most_tokens(self) -> int:
        """The tokens of an image, the most that a video may have."""
        return image_tokens(self.width, self.height) if self.kind == "image" else MOST_VIDEO_TOKENS


def read_header(data: bytes, kind: MediaKind) -> Header:
    """The header of a file that is sent as an image or as a video.

    Raises:
        InvalidMedia: it is none, is cut off in its header, or is past a limit; the message is a clause about it.
    """
    most = MAX_IMAGE_BYTES if kind == "image" else MAX_VIDEO_BYTES
    if len(data) > most:
        raise InvalidMedia(f"has {len(data):,} bytes; there may be {most:,}")
    header = _image(data) or _video(data)
    if header is None or header.kind != kind or header.format in NOT_READ:
        wanted = f"an image is {IMAGE_FORMATS}" if kind == "image" else f"a video is {VIDEO_FORMATS}"
        found = f"is {header.format}" if header else f"begins like no {kind} that is read here"
        raise InvalidMedia(f"{found}; {wanted}")
    if kind == "image":
        _check_size(header)
    else:
        _check_track(matroska_track(data) if header.format == "Matroska" else mp4_track(data))
    return header


def _check_track(track: Track) -> None:
    """Refuse what a container admits; the decoder finds what it does not, and counts frames where a rate is odd."""
    if track.width * track.height > MAX_FRAME_PIXELS:
        raise InvalidMedia(
            f"has frames of {track.width:,} x {track.height:,} pixels; there may be {MAX_FRAME_PIXELS:,}"
        )
    if track.width * track.height:
        frame_size(FRAMES[1], track.width, track.height)
    if track.seconds > MAX_SECONDS and FPS_RANGE[0] <= track.fps <= FPS_RANGE[1]:
        raise InvalidMedia(f"is {track.seconds:,.0f} seconds long; there may be {MAX_SECONDS}")


def _check_size(header: Header) -> None:
    width, height = header.width, header.height
    if not width * height:
        raise InvalidMedia(f"is {header.format} of {width:,} x {height:,} pixels")
    if width * height > MAX_IMAGE_PIXELS:
        raise InvalidMedia(f"is {width:,} x {height:,} pixels; there may be {MAX_IMAGE_PIXELS:,}")
    image_tokens(width, height)


def _image(data: bytes) -> Header | None:
    if data.startswith(PNG):
        return Header("image", "PNG", *_png(data))
    if data.startswith(b"\xff\xd8\xff"):
        return Header("image", "JPEG", *_jpeg(data))
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return Header("image", "WebP", *_webp(data))
    return None


def _video(data: bytes) -> Header | None:
    if data[4:8] == b"ftyp":
        brand = data[8:12]
        if brand in STILLS:
            return Header("image", "AVIF" if brand.startswith(b"avi") else "HEIC")
        return Header("video", "QuickTime" if brand == b"qt  " else "MP4")
    if data.startswith(EBML):
        return Header("video", "Matroska")
    return None


def _png(data: bytes) -> tuple[int, int]:
    if data[8:16] != b"\x00\x00\x00\x0dIHDR" or len(data) < 33:
        raise _cut_off("PNG")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        at = data.find(b"\xff", at) + 1
        while 0 < at < len(data) and data[at] == 0xFF:  # fill bytes
            at += 1
        if not 0 < at <= len(data) - 8 or data[at] in JPEG_PICTURE:
            break
        if data[at] in JPEG_LONE:
            continue
        if data[at] in JPEG_FRAMES:
            return int.from_bytes(data[at + 6 : at + 8]), int.from_bytes(data[at + 4 : at + 6])
        at += 1 + max(2, int.from_bytes(data[at + 1 : at + 3]))
    raise _cut_off("JPEG")


def _webp(data: bytes) -> tuple[int, int]:
    chunk, body = data[12:16], data[20:30]
    if len(body) == 10:
        if chunk == b"VP8X":
            return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
        if chunk == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
            width, height = (int.from_bytes(body[at : at + 2], "little") & 0x3FFF for at in (6, 8))
            return width, height
        if chunk == b"VP8L" and body[0] == 0x2F:
            bits = int.from_bytes(body[1:5], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    raise _cut_off("WebP")


def _cut_off(name: str) -> InvalidMedia:
    return InvalidMedia(f"begins like {name} and has no header that gives its size")
