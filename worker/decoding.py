"""Encoded images and videos to RGB frames, with the pixels that the checkpoint's runtime reads.

Pillow decodes images; of videos come the frames that OpenCV's reader gives: its count, rate, numbers and rotation. Only
the process that `media_child` confines may call this with a stranger's file.
"""

import io
import math
from collections.abc import Iterator
from typing import Final, cast

import av
import numpy as np
from av.container import InputContainer
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

from d3serve.errors import InvalidMedia
from d3serve.media.headers import read_header
from d3serve.media.sizes import (
    FRAMES,
    MAX_FRAME_PIXELS,
    MAX_IMAGE_PIXELS,
    MAX_SECONDS,
    frame_size,
    plausible_fps,
    sampled,
)

Pixels = NDArray[np.uint8]  # [height, width, 3], RGB

THREADS: Final = 4
IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP")
OPENED_AS: Final = (
    *IMAGE_FORMATS,
    "MPO",
)  # a JPEG with more pictures behind: phones write them; the first is read
DEMUXERS: Final = {"MP4": "mp4", "QuickTime": "mov", "Matroska": "matroska"}
CODECS: Final = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg", "prores"})


def image(data: bytes) -> Pixels:
    """An image's pixels as RGB, and nothing else: no rotation by EXIF, no profile, no blending of what is transparent.

    Raises:
        InvalidMedia: it is past a limit.
    and whatever Pillow raises on a file that is broken.
    """
    read_header(data, "image")
    with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as checked:
        if checked.format not in OPENED_AS:
            raise InvalidMedia(f"is {checked.format}")
        if checked.width * checked.height > MAX_IMAGE_PIXELS:
            raise InvalidMedia(f"is {checked.width:,} x {checked.height:,} pixels")
        checked.verify()
    with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as opened:
        return np.asarray(opened.convert("RGB"))


class Video:
    """A video's frames as OpenCV's reader gives them, two for each second and 4 to 32 of all.

    Raises InvalidMedia where it is past a limit, and whatever FFmpeg raises on a file that is broken.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._demuxer = DEMUXERS[read_header(data, "video").format]
        with self._open() as container:
            stream = self._stream(container)
            rate = float(stream.average_rate or 0)
            self.fps = plausible_fps(rate)
            self.total = stream.frames or _by_duration(container, stream, rate)
        if self.total <= 0:
            self.total = self._count()
        if not self.total:
            raise InvalidMedia("has no frames")
        if self.total / self.fps > MAX_SECONDS:
            seconds = self.total / self.fps
            raise InvalidMedia(f"is {seconds:,.0f} seconds long; there may be {MAX_SECONDS}")

    def frames(self) -> Iterator[tuple[float, Pixels]]:
        """The frames that are read, with their times in seconds; fewer than were chosen where some do not decode.

        Times are numbers divided by the rate, also where the file has other ones.
        """
        wanted = set(sampled(self.total, self.fps))
        last, first = max(wanted), None
        for number, frame in enumerate(self._decoded()):
            if frame is not None and number in wanted:
                pixels = _rgb(frame)
                first = first or pixels.shape
                if pixels.shape != first:
                    raise InvalidMedia("has frames of different sizes")
                yield number / self.fps, pixels
            if number >= last:
                return

    def _count(self) -> int:
        """Count frames where the container says nothing, no further than the longest video has some."""
        most, count = int(MAX_SECONDS * self.fps), 0
        for frame in self._decoded():
            count += frame is not None
            if frame is None or count > most:
                break
        return count

    def _decoded(self) -> Iterator[VideoFrame | None]:
        """Every frame in order; None where one cannot be decoded."""
        with self._open() as container:
            stream = self._stream(container)
            stream.thread_type = "AUTO"
            stream.codec_context.thread_count = THREADS
            packets = container.demux(stream)
            while True:
                try:
                    packet = next(packets, None)
                except av.FFmpegError:
                    packet = None  # what is cut off ends here
                    yield from _flushed(stream)
                if packet is None:
                    return
                try:
                    frames = packet.decode()
                except av.FFmpegError:
                    yield None
                else:
                    yield from frames

    def _open(self) -> InputContainer:
        file = io.BytesIO(self._data)
        return cast("InputContainer", av.open(file, format=self._demuxer, metadata_errors="ignore"))

    def _stream(self, container: InputContainer) -> VideoStream:
        if not container.streams.video:
            raise InvalidMedia("holds no video")
        stream = container.streams.video[0]
        context: VideoCodecContext | None = stream.codec_context  # unlike what its types say
        codec = "something unknown" if context is None else context.codec.canonical_name
        if codec not in CODECS:
            raise InvalidMedia(f"is coded as {codec}; read are {', '.join(sorted(CODECS))}")
        _check_frame(stream.codec_context.width, stream.codec_context.height)
        return stream


def _by_duration(container: InputContainer, stream: VideoStream, rate: float) -> int:
    seconds = (container.duration or 0) / av.time_base
    if seconds <= 0 and stream.duration and stream.time_base:
        seconds = float(stream.duration * stream.time_base)
    return math.floor(seconds * rate + 0.5)


def _flushed(stream: VideoStream) -> list[VideoFrame]:
    try:
        return stream.decode(None)
    except av.FFmpegError:
        return []


def _rgb(frame: VideoFrame) -> Pixels:
    _check_frame(frame.width, frame.height)
    pixels = cast("Pixels", frame.to_ndarray(format="rgb24", interpolation="BICUBIC"))
    turns, rest = divmod(frame.rotation, 90)
    return np.rot90(pixels, turns) if not rest else pixels


def _check_frame(width: int, height: int) -> None:
    if width * height > MAX_FRAME_PIXELS:
        raise InvalidMedia(f"has frames of {width:,} x {height:,} pixels; there may be {MAX_FRAME_PIXELS:,}")
    if not width * height:
        raise InvalidMedia("has frames of no size")
    frame_size(FRAMES[1], width, height)
