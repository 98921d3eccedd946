"""The process that decodes may die, hang or lie: that costs one file its answer, and nobody else anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from media_files import picture, saved, video
from processes import ends, is_alive

from d3serve.errors import InternalError, InvalidMedia
from d3serve.worker import media_decoder
from d3serve.worker.media_decoder import MediaDecoder

HERE = Path(__file__).parent


@pytest.fixture
def decoder():
    decoder = MediaDecoder()
    yield decoder
    decoder.close()


@pytest.fixture
def odd(decoder, monkeypatch):
    """A decoder whose process does what a file says, to be asked for by that."""
    monkeypatch.setattr(media_decoder, "CHILD", "odd_child")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("D3SERVE_REDIS_URL", "redis://:secret@127.0.0.1:1")
    return lambda what, kind="image": decoder.begin(kind, what, what.encode).result(timeout=200)


def png():
    return saved(picture(40, 40), "PNG")


def test_a_file_that_kills_the_process_is_refused_and_the_next_one_is_read(odd):
    for what in ("die", "die after"):
        with pytest.raises(InvalidMedia, match="ends the process"):
            odd(what)
        assert odd("fine").grid == (1, 16, 16)


def test_a_file_that_takes_too_long_is_refused_and_its_process_ended(odd, decoder, monkeypatch):
    odd("fine")
    pid = decoder._process.pid
    monkeypatch.setattr(media_decoder, "FILE_S", 0.2)  # it never answers, however long it has
    with pytest.raises(InvalidMedia, match="takes longer than"):
        odd("sleep")
    assert not is_alive(pid)


@pytest.mark.parametrize(
    "what",
    [
        "nonsense", '{"frame":[0,4],"seconds":0}', '{"frame":[99999,99999],"seconds":0}', "[]", "{}", "null",
        '{"frame":[-4,-4],"seconds":0}', '{"frame":4,"seconds":0}', '{"frame":["a","b"],"seconds":"c"}', '{"done":1}',
        '{"frame":[1,900],"seconds":0}',
    ],
)  # fmt: skip
def test_what_a_process_says_that_it_should_not_harms_nobody(odd, what):
    with pytest.raises(InvalidMedia):
        odd(f"say {what}")
    assert odd("fine").pads == 64


def test_no_file_can_be_opened_no_connection_made_and_no_memory_taken_without_end(odd):
    with pytest.raises(InvalidMedia) as told:
        odd("try")
    assert (
        told.value.message
        == "open OSError, write OSError, connect OSError, listen OSError, memory MemoryError"
    )


def test_no_secret_reaches_the_process(odd, decoder):
    odd("fine")
    environ = Path(f"/proc/{decoder._process.pid}/environ").read_bytes()
    assert b"PYTHONPATH" in environ
    assert b"D3SERVE" not in environ


def test_a_process_that_does_not_start_is_no_fault_of_the_file(decoder, monkeypatch):
    monkeypatch.setattr(media_decoder, "CHILD", "no_such_child")
    with pytest.raises(InternalError, match="does not start"):
        decoder.begin("image", "a", png).result(timeout=200)


def test_a_process_that_somebody_else_killed_costs_no_file(decoder):
    decoder.begin("image", "a", png).result(timeout=200)
    os.kill(decoder._process.pid, 9)
    assert decoder.begin("image", "b", png).result(timeout=200).pads == 64


def test_the_same_file_is_decoded_once(decoder):
    asked = []

    def data():
        asked.append(1)
        return png()

    first, second = decoder.begin("image", "a", data), decoder.begin("image", "a", data)
    assert (
        first.result(timeout=200) is second.result(timeout=200) is decoder.begin("image", "a", data).result()
    )
    assert len(asked) == 1


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(decoder, monkeypatch):
    monkeypatch.setattr(media_decoder, "KEPT_BYTES", 2 * 3 * 256 * 256)
    for name in "abcab":
        decoder.begin("image", name, png).result(timeout=200)
    decoder.begin("image", "b", png)
    assert [name for _, name in decoder._kept] == ["a", "b"]


def test_a_file_that_was_refused_is_tried_again(decoder):
    with pytest.raises(InvalidMedia):
        decoder.begin("image", "a", lambda: b"").result(timeout=200)
    assert decoder.begin("image", "a", png).result(timeout=200)


def test_the_process_ends_with_its_parent_even_at_work():
    script = (
        "import sys; from d3serve.worker import media_decoder as m; m.CHILD = 'odd_child'\n"
        "p = m.DecodingProcess(); print(p.pid, flush=True)\n"
        "list(p.frames('image', b'sleep'))"
    )
    environ = {**os.environ, "PYTHONPATH": str(HERE)}
    with subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    assert ends(pid, timeout_s=60)


def test_the_process_has_no_torch():
    script = "import sys, d3serve.worker.media_child as m; m.rehearse(); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=200)
    assert told.stdout == b"False\n"


def test_a_video_of_large_frames_takes_no_memory_for_all_of_them(decoder):
    medium = decoder.begin("video", "a", lambda: video(size=(1920, 1080), count=40, rate=4)).result(
        timeout=200
    )
    assert medium.frames.shape == (20, 3, 320, 576)
