"""What a video's container says is what its decoder finds, and past a limit it is refused before any job."""

import io
import re

import av
import pytest
from hostile_files import with_duration
from media_files import video, videos

from d3serve.errors import InvalidMedia
from d3serve.media.containers import Track, matroska_track, mp4_track
from d3serve.media.headers import read_header

VIDEOS = videos()


@pytest.mark.parametrize("name", VIDEOS)
def test_a_container_tells_what_its_decoder_finds(name):
    data = VIDEOS[name]
    track = mp4_track(data) if data[4:8] == b"ftyp" else matroska_track(data)
    with av.open(io.BytesIO(data)) as opened:
        stream = opened.streams.video[0]
        found = (stream.codec_context.width, stream.codec_context.height)
        rate, frames = float(stream.average_rate), stream.frames
        seconds = frames / rate if frames else opened.duration / 1e6
    if name == "h264-cut":
        assert track == Track(), "it says that it is longer than it is"
    else:
        assert (track.width, track.height) == found
        assert track.fps == pytest.approx(rate)
        assert track.seconds == pytest.approx(seconds, abs=1e-3)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (lambda: video(rate=1, count=301, size=(32, 32)), "is 301 seconds long; there may be 300"),
        (lambda: with_duration(video("libx264", "matroska", count=3), 36_000), "is 36,000 seconds long"),
        (lambda: video(size=(4096, 2160), count=1), "frames of 4,096 x 2,160 pixels; there may be 8,294,400"),
        (lambda: video("libvpx", "webm", size=(4096, 2160), count=1), "frames of 4,096 x 2,160 pixels"),
        (lambda: video(size=(6800, 32), count=2), "one side may be 200 times the other"),
    ],
    ids=["seconds", "seconds of Matroska", "pixels", "pixels of WebM", "ribbon"],
)
def test_a_video_past_a_limit_is_refused_by_its_header(data, told):
    with pytest.raises(InvalidMedia, match=re.escape(told)):
        read_header(data(), "video")


def test_a_video_as_long_as_one_may_be_is_taken():
    assert read_header(video(rate=1, count=300, size=(32, 32)), "video").kind == "video"
