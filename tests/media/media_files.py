"""Small images and videos of all kinds, made where they are needed."""

import io
from fractions import Fraction

import av
import numpy as np
from PIL import Image


def noise(height, width, channels=3, seed=0, dtype=np.uint8):
    """Blocks of noise: hard edges and flat parts, so that a wrong resize shows, and yet small files."""
    rng = np.random.default_rng([seed, height, width, channels])
    blocks = rng.integers(0, np.iinfo(dtype).max, (-(-height // 5), -(-width // 5), channels), dtype=dtype)
    return np.kron(blocks, np.ones((5, 5, 1), dtype=dtype))[:height, :width].squeeze()


def saved(image, kind, **options):
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width, height, mode="RGB", seed=0):
    """A Pillow image of a mode."""
    if mode == "I;16":
        return Image.fromarray(noise(height, width, 1, seed, np.uint16))
    return Image.fromarray(noise(height, width, seed=seed)).convert(mode)


def with_alpha(width, height):
    """Colours also where nothing is to be seen."""
    image = picture(width, height)
    image.putalpha(picture(width, height, "L", seed=1))
    return image


def turned(width, height):
    """A photo as a phone writes it that was held upright: turned by EXIF, and that is not obeyed."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(picture(width, height), "JPEG", exif=exif)


def images():
    """Files of every kind that is read, by name."""
    palette = picture(90, 61).quantize(17)
    more = [picture(50, 40, seed=seed) for seed in range(3)]
    files = {f"png-{w}x{h}": saved(picture(w, h), "PNG") for w, h in [
        (1, 1), (123, 77), (10, 1999), (80, 16), (640, 640), (1301, 1277), (2600, 700), (256, 256), (31, 33)
    ]}  # fmt: skip
    return files | {
        "png-grey": saved(picture(70, 50, "L"), "PNG"),
        "png-bits": saved(picture(70, 50, "1"), "PNG"),
        "png-16-bit": saved(picture(60, 40, "I;16"), "PNG"),
        "png-alpha": saved(with_alpha(300, 200), "PNG"),
        "png-grey-alpha": saved(with_alpha(60, 50).convert("LA"), "PNG"),
        "png-palette": saved(palette, "PNG"),
        "png-palette-transparent": saved(palette, "PNG", transparency=3),
        "png-animated": saved(more[0], "PNG", save_all=True, append_images=more[1:]),
        "png-interlaced-profile": saved(picture(90, 90), "PNG", icc_profile=b"profile" * 9, dpi=(72, 72)),
        "jpeg-320x224-turned": turned(320, 224),
        "jpeg-grey": saved(picture(77, 99, "L"), "JPEG"),
        "jpeg-cmyk": saved(picture(77, 99, "CMYK"), "JPEG"),
        "jpeg-progressive": saved(picture(401, 299), "JPEG", progressive=True, quality=60),
        "jpeg-4-4-4": saved(picture(150, 151), "JPEG", subsampling=0),
        "jpeg-several": saved(more[0], "MPO", save_all=True, append_images=more[1:]),
        "webp": saved(picture(200, 130), "WEBP"),
        "webp-lossless": saved(picture(65, 64), "WEBP", lossless=True),
        "webp-alpha": saved(with_alpha(120, 90), "WEBP", lossless=True),
        "webp-animated": saved(more[0], "WEBP", save_all=True, append_images=more[1:]),
    }


def video(codec="mpeg4", container="mp4", size=(64, 48), rate=10, count=12, pix_fmt="yuv420p", times=None, turn=0,
          options=None):  # fmt: skip
    """A video as a file: a block that wanders over noise; `times` are its frames', in hundredths of a second."""
    file = io.BytesIO()
    width, height = size
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.thread_count = 1
        if times:
            stream.codec_context.time_base = Fraction(1, 100)
        background = noise(height, width, seed=7)
        for number in range(count):
            pixels = background.copy()
            left = number * 3 % max(1, width - 12)
            pixels[4:16, left : left + 12] = (250, 5 * number % 256, 20)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[number], Fraction(1, 100)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return rotated(file.getvalue(), turn) if turn else file.getvalue()


def with_sound(mp4, seconds):
    """An MP4 that plays silence beside its frames, for so long."""
    file = io.BytesIO()
    with av.open(io.BytesIO(mp4)) as read, av.open(file, "w", format="mp4") as out:
        frames = out.add_stream_from_template(read.streams.video[0])
        sound = out.add_stream("aac", rate=8000)
        for packet in read.demux(video=0):
            if packet.dts is not None:
                packet.stream = frames
                out.mux(packet)
        for number in range(8 * seconds):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1000), np.float32), "fltp", "mono")
            frame.rate, frame.pts = 8000, 1000 * number
            out.mux(sound.encode(frame))
        out.mux(sound.encode(None))
    return file.getvalue()


MATRICES = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}


def rotated(mp4, degrees):
    """An MP4 whose track says that it is to be shown turned."""
    a, b, c, d = (value * 65536 for value in MATRICES[degrees])
    plain = b"".join(n.to_bytes(4) for n in (65536, 0, 0, 0, 65536, 0, 0, 0, 0x40000000))
    matrix = b"".join(n.to_bytes(4, signed=True) for n in (a, b, 0, c, d, 0, 0, 0, 0x40000000))
    head, found, tail = mp4.rpartition(plain)  # the movie's own comes first
    assert found
    return head + matrix + tail


def videos():
    """Files of every kind that is read, by name."""
    x264, vp9 = {"preset": "ultrafast"}, {"deadline": "realtime", "cpu-used": "8"}
    slow_fast = [n * 3 for n in range(8)] + [24 + n * 40 for n in range(7)]
    return {
        "h264-mp4": video("libx264", options=x264, size=(320, 240), rate=30, count=75),
        "h264-mkv": video("libx264", "matroska", options=x264, rate=25, count=50),
        "h264-mov": video("libx264", "mov", options=x264, count=9),
        "h264-4-4-4": video("libx264", options=x264, pix_fmt="yuv444p"),
        "h264-odd-sides": video("libx264", options=x264, pix_fmt="yuv444p", size=(75, 51)),
        "h264-29.97": video("libx264", options=x264, rate=Fraction(30000, 1001), count=61),
        "h264-120-fps": video("libx264", options=x264, rate=120, count=130),
        "h264-varying": video("libx264", options=x264, count=15, times=slow_fast),
        "h264-90": video("libx264", options=x264, turn=90),
        "h264-180": video("libx264", options=x264, turn=180),
        "h264-270": video("libx264", options=x264, turn=270),
        "h264-b-frames": video("libx264", options={"preset": "fast", "bf": "3"}, rate=24, count=48),
        "mpeg4-mp4": video(),
        "mpeg4-20px": video(size=(20, 20)),
        "mpeg4-wide": video(size=(640, 36)),
        "mpeg4-720p": video(size=(1280, 720), count=5),
        "mpeg4-sound-that-goes-on": with_sound(video(count=30), 9),
        "mpeg4-one": video(count=1),
        "mpeg4-two": video(count=2, size=(32, 32)),
        "mpeg4-three": video(count=3, size=(32, 32)),
        "mpeg4-five": video(count=5),
        "mpeg4-seconds": video(rate=1, count=21),
        "mpeg4-long": video(rate=4, count=200, size=(32, 32)),
        "vp9-webm": video("libvpx-vp9", "webm", options=vp9, rate=25, count=40),
        "vp9-mkv": video("libvpx-vp9", "matroska", options=vp9, count=7),
        "vp8-webm": video("libvpx", "webm", options=vp9, count=13),
        "h264-cut": video("libx264", "matroska", options={"preset": "ultrafast", "g": "4"}, count=40)[:-2500],
    }
