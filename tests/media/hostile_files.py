"""Files that nobody means well with, by name: what they are sent as, their bytes, and what comes of them.

`REFUSED`: no picture comes of it. `READ`: it is odd, and still one. `EITHER`: a decoder makes of it what it can.
"""

import io
import struct
import zlib

import av
import numpy as np
from media_files import picture, saved, video

REFUSED, READ, EITHER = "refused", "read", "either"
HIDDEN = "@HIDDEN@"  # stands for a path, and SERVER for a host and port, that no decoder may open
SERVER = "@SERVER@"


def chunk(name, data):
    """A chunk of a PNG."""
    return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)


def png(width, height, *more, bits=8, colour=0, interlace=0, data=None):
    """A grey PNG of zeros, of any declared size."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlace)
    if data is None:
        rows = min(height, 64) * (1 + -(-min(width, 4096) * bits // 8))
        data = zlib.compress(bytes(rows))
    body = [chunk(b"IHDR", header), *more, chunk(b"IDAT", data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def bomb(size=48 * 2**20):
    """Zeros, a thousandth of their size."""
    return zlib.compress(bytes(size), 9)


def broken_pngs():
    """PNGs, each wrong in its own way."""
    good = saved(picture(60, 40), "PNG")
    flipped = bytearray(good)
    flipped[-20] ^= 0xFF
    one_bit = zlib.compress(bytes(4000 * 501), 9)
    return {
        "png-signature": (good[:8], REFUSED),
        "png-no-picture": (good[:33], REFUSED),
        "png-half": (good[: len(good) // 2], REFUSED),
        "png-no-end": (good[:-20], REFUSED),
        "png-bad-sum": (bytes(flipped), REFUSED),
        "png-400-mp": (png(20_000, 20_000), REFUSED),
        "png-2^31": (png(2**31 - 1, 2**31 - 1), REFUSED),
        "png-too-many-pixels": (png(4001, 4000), REFUSED),
        "png-no-width": (png(0, 10), REFUSED),
        "png-ribbon": (png(1, 201), REFUSED),
        "png-wide-ribbon": (png(2010, 10), REFUSED),
        "png-3-bits": (png(8, 8, bits=3), REFUSED),
        "png-colour-5": (png(8, 8, colour=5), REFUSED),
        "png-interlace-7": (png(8, 8, interlace=7), EITHER),
        "png-no-palette": (png(8, 8, colour=3), EITHER),
        "png-text-bomb": (png(8, 8, chunk(b"zTXt", b"a\0\0" + bomb())), REFUSED),
        "png-profile-bomb": (png(8, 8, chunk(b"iCCP", b"a\0\0" + bomb())), REFUSED),
        "png-text-of-16-mb": (png(8, 8, *[chunk(b"zTXt", b"a\0\0" + bomb(2**20 - 9))] * 99), REFUSED),
        "png-data-bomb": (png(50, 50, data=bomb()), EITHER),
        "png-16-mp": (png(4000, 4000, bits=1, data=one_bit), READ),
        "png-2^31-frames": (png(8, 8, chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))), EITHER),
        "png-and-page": (good + b"<script>alert(1)</script>", READ),
    }


def broken_jpegs():
    """JPEGs, each wrong in its own way."""
    good = saved(picture(60, 40), "JPEG")
    frame = good.index(b"\xff\xc0")
    scan = good.index(b"\xff\xda")

    def sized(width, height):
        return good[: frame + 5] + struct.pack(">HH", height, width) + good[frame + 9 :]

    several = saved(picture(60, 40), "MPO", save_all=True, append_images=[picture(60, 40)])
    index = several.index(b"MPF\0")
    return {
        "jpeg-start": (good[:3], REFUSED),
        "jpeg-half": (good[: scan + 40], REFUSED),
        "jpeg-no-scan": (good[:scan], REFUSED),
        "jpeg-4-gp": (sized(65_535, 65_535), REFUSED),
        "jpeg-taller-than-told": (sized(60, 4000), EITHER),
        "jpeg-no-height": (sized(60, 0), REFUSED),
        "jpeg-ribbon": (sized(4020, 20), REFUSED),
        "jpeg-no-frame": (good[:frame] + good[scan:], REFUSED),
        "jpeg-5000-segments": (good[:2] + b"\xff\xe5\0\2" * 5000 + good[2:], REFUSED),
        "jpeg-segment-past-end": (good[:2] + b"\xff\xe5\xff\xff" + good[2:], EITHER),
        "jpeg-two-frames": (good[:scan] + sized(3999, 4000)[frame:], REFUSED),
        "jpeg-12-bits": (good[: frame + 4] + b"\x0c" + good[frame + 5 :], REFUSED),
        "jpeg-index-past-end": (several[: index + 8] + b"\xff" * 4 + several[index + 12 :], EITHER),
        "jpeg-zeros-behind": (good + bytes(10**6), READ),
    }


def broken_webps():
    """WebPs, each wrong in its own way."""
    good, lossless = saved(picture(60, 40), "WEBP"), saved(picture(60, 40), "WEBP", lossless=True)
    frames = [picture(32, 32, seed=n) for n in range(40)]
    animated = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], loop=0, duration=1)
    return {
        "webp-start": (good[:16], REFUSED),
        "webp-half": (good[: len(good) // 2], REFUSED),
        "webp-lossless-half": (lossless[: len(lossless) // 2], REFUSED),
        "webp-huge-canvas": (b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0" + b"\xff" * 6, REFUSED),
        "webp-16383": (lossless[:21] + b"\xff\xff\xff\x0f" + lossless[25:], REFUSED),
        "webp-signature": (lossless[:20] + b"\0" + lossless[21:], REFUSED),
        "webp-size-2^32": (good[:4] + b"\xff" * 4 + good[8:], EITHER),
        "webp-endless": (animated, READ),
    }


def no_images():
    """What is no image that is read, whatever it is called."""
    frames = [picture(16, 16, seed=n) for n in range(9)]
    small = frames[0]
    return {
        "nothing": (b"", REFUSED),
        "one-byte": (b"\xff", REFUSED),
        "zeros": (bytes(1000), REFUSED),
        "text": (b"hello", REFUSED),
        "page": (b"<html><img src='http://" + SERVER.encode() + b"/x'></html>", REFUSED),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='" + HIDDEN.encode() + b"'/></svg>", REFUSED),
        "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(" + HIDDEN.encode() + b") run", REFUSED),
        "pdf": (b"%PDF-1.7\n", REFUSED),
        "gif-endless": (saved(small, "GIF", save_all=True, append_images=frames, loop=0), REFUSED),
        "bmp": (saved(small, "BMP"), REFUSED),
        "tiff": (saved(small, "TIFF"), REFUSED),
        "icon": (saved(small, "ICO"), REFUSED),
        "avif": (b"\0\0\0\x1cftypavif" + bytes(99), REFUSED),
        "heic": (b"\0\0\0\x1cftypheic" + bytes(99), REFUSED),
        "video": (video(count=4), REFUSED),
        "too-many-bytes": (saved(small, "PNG") + bytes(8_000_000), REFUSED),
    }  # fmt: skip


def patched(data, old, new):
    """`data` with the first `old` replaced."""
    assert old in data
    return data.replace(old, new, 1)


def with_duration(mkv, seconds):
    """A Matroska file that says that it is so long."""
    at = mkv.index(b"\x44\x89\x88") + 3
    return mkv[:at] + struct.pack(">d", seconds * 1000) + mkv[at + 8 :]


def atom(name, *parts):
    """A box of an MP4."""
    body = b"".join(parts)
    return (8 + len(body)).to_bytes(4) + name + body


def elsewhere(mp4):
    """An MP4 whose frames are said to lie in another file."""
    here, there = atom(b"url ", b"\0\0\0\1"), atom(b"url ", b"\0\0\0\0", f"file://{HIDDEN}\0".encode())
    out = bytearray(patched(mp4, here, there))
    for name in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        at = out.index(name) - 4
        out[at : at + 4] = (int.from_bytes(out[at : at + 4]) + len(there) - len(here)).to_bytes(4)
    return bytes(out)


def flipped(data, seed, share=0.002):
    """`data` with some of its bytes replaced, but for the first 64."""
    rng, out = np.random.default_rng(seed), bytearray(data)
    for at in rng.integers(64, len(out), max(1, round(len(out) * share))):
        out[at] = rng.integers(256)
    return bytes(out)


def sound():
    """An MP4 without a picture."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.rate = 8000
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


def broken_videos():
    """Videos, each wrong in its own way."""
    mp4, mkv = video(count=20), video("libx264", "matroska", options={"preset": "ultrafast"}, count=20)
    start = b"\0\0\0\x14ftypmp42\0\0\0\0mp42"
    movie = mp4.index(b"moov") - 4
    big = video(size=(4096, 2160), count=1)
    size = struct.pack(">HH", 64, 48)
    found = {
        "mp4-start": (start, REFUSED),
        "mp4-no-movie": (mp4[:movie], REFUSED),
        "mp4-no-frames": (start + atom(b"moov", atom(b"mvhd", bytes(100))), REFUSED),
        "mp4-half": (mp4[: len(mp4) // 2], REFUSED),
        "mp4-sound": (sound(), REFUSED),
        "mp4-2^63": (start + b"\0\0\0\1moov" + b"\x7f" + b"\xff" * 7 + bytes(99), REFUSED),
        "mp4-deep": (start + b"".join(b"\0\xff\xff\xffmoov" for _ in range(9000)), REFUSED),
        "mp4-another-file": (elsewhere(mp4), EITHER),
        "mp4-no-size": (patched(mp4, size, bytes(4)), EITHER),
        "mp4-65535": (patched(mp4, size, b"\xff" * 4), EITHER),
        "mp4-other-codec": (patched(mp4, b"mp4v", b"Hap1"), EITHER),
        "mov-raw-frames": (video("rawvideo", "mov", pix_fmt="rgb24", count=2), REFUSED),
        "mov-unknown-codec": (
            patched(video("rawvideo", "mov", pix_fmt="rgb24", count=2), b"raw ", b"zzzz"),
            REFUSED,
        ),
        "mp4-and-playlist": (start + b"#EXTM3U\n#EXTINF:1\nfile://" + HIDDEN.encode(), REFUSED),
        "mp4-8.8-mp": (big, REFUSED),
        "mp4-ribbon": (video(size=(4000, 20), count=2), READ),
        "mp4-long-ribbon": (video(size=(6800, 32), count=2), REFUSED),
        "mp4-too-many-bytes": (mp4 + bytes(32_000_000), REFUSED),
        "mp4-and-page": (mp4 + b"<script>", READ),
        "mp4-one-frame": (video(count=1), READ),
        "mkv-start": (mkv[:4], REFUSED),
        "mkv-header": (mkv[:60], REFUSED),
        "mkv-half": (mkv[: len(mkv) // 2], EITHER),
        "mkv-10-h": (with_duration(mkv, 36_000), REFUSED),
        "mkv-nan": (with_duration(mkv, float("nan")), EITHER),
        "mkv-endless": (with_duration(mkv, float("inf")), EITHER),
        "mkv-negative": (with_duration(mkv, -5.0), EITHER),
        "mkv-5000-s-of-20": (with_duration(mkv, 299), READ),
        "mkv-other-codec": (patched(mkv, b"V_MPEG4/ISO/AVC", b"V_UNCOMPRESSED\0"), REFUSED),
        "mkv-sizes-2^56": (mkv[:4] + b"\x01" + b"\xff" * 7 + mkv[5:], EITHER),
        "mkv-zeros": (mkv[:60] + bytes(10**6), REFUSED),
    }
    for seed in range(6):
        found[f"mp4-damaged-{seed}"] = (flipped(mp4, seed), EITHER)
        found[f"mkv-damaged-{seed}"] = (flipped(mkv, seed), EITHER)
    return found


def no_videos():
    """What is no video that is read, whatever it is called."""
    small = picture(16, 16)
    frames = io.BytesIO()
    with av.open(frames, "w", format="mpegts") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height = 32, 32
        out.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        out.mux(stream.encode(None))
    playlist = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"
    texts = {
        "hls-file": playlist.format(HIDDEN),
        "hls-url": playlist.format(f"http://{SERVER}/a.ts"),
        "hls-concat": playlist.format(f"concat:{HIDDEN}|http://{SERVER}/"),
        "concat": f"ffconcat version 1.0\nfile {HIDDEN}\n",
        "sdp": f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {SERVER[-1:]} RTP/AVP 96\n",
        "dash": f"<?xml version='1.0'?><MPD><BaseURL>http://{SERVER}/</BaseURL></MPD>",
        "asx": f"<asx><entry><ref href='http://{SERVER}/'/></entry></asx>",
    }  # fmt: skip
    return {name: (text.encode(), REFUSED) for name, text in texts.items()} | {
        "png-as-video": (saved(small, "PNG"), REFUSED),
        "gif-as-video": (saved(small, "GIF"), REFUSED),
        "jpeg-as-video": (saved(small, "JPEG"), REFUSED),
        "mpeg-ts": (frames.getvalue(), REFUSED),
        "avi": (video(container="avi"), REFUSED),
        "flash": (b"FLV\1\5\0\0\0\x09" + bytes(99), REFUSED),
        "raw-h264": (b"\0\0\0\1\x67\x42\0\x0a" + bytes(99), REFUSED),
        "avif-as-video": (b"\0\0\0\x1cftypavis" + bytes(99), REFUSED),
    }


def hostile_files(secret, server):
    """All of them; `secret` and `server` are a path and an address that must not be touched."""
    images = broken_pngs() | broken_jpegs() | broken_webps() | no_images()
    clips = broken_videos() | no_videos()
    found = [(name, "image", *what) for name, what in images.items()]
    found += [(name, "video", *what) for name, what in clips.items()]

    def named(data):
        return data.replace(HIDDEN.encode(), secret.encode()).replace(SERVER.encode(), server.encode())

    return [(name, kind, named(data), outcome) for name, kind, data, outcome in found]
