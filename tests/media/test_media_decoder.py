"""The process that decodes may die, hang or lie: that costs one file its answer, and nobody else anything."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from media_files import picture, saved, video
from processes import ends, is_alive

from d3serve.errors import InternalError, InvalidMedia, Overloaded, ShuttingDown
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


def state(pid):
    """The kernel's letter for what a process does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def png():
    return saved(picture(40, 40), "PNG")


def test_a_file_that_kills_the_process_is_refused_and_the_next_one_is_read(odd):
    for what in ("die", "die after"):
        with pytest.raises(InvalidMedia, match="ends the process"):
            odd(what)
        assert odd("fine").grid == (1, 16, 16)


def test_a_file_that_takes_too_much_of_a_processor_is_refused_and_its_process_ended(
    odd, decoder, monkeypatch
):
    odd("fine")
    pid = decoder._process.pid
    monkeypatch.setattr(media_decoder, "PROCESSOR_S", 1)
    with pytest.raises(InvalidMedia, match="takes more than 1 s of a processor"):
        odd("burn")
    assert not is_alive(pid)
    assert odd("fine ").pads == 64


def test_a_process_that_took_much_for_other_files_takes_as_much_for_the_next(odd, decoder, monkeypatch):
    monkeypatch.setattr(media_decoder, "PROCESSOR_S", 1)
    odd("fine")
    pid = decoder._process.pid
    for number in range(4):
        with pytest.raises(InvalidMedia, match="worked"):
            odd(f"work {number}")
    assert decoder._process.pid == pid


def test_a_process_that_does_not_answer_is_replaced_and_its_file_not_blamed(odd, decoder, monkeypatch):
    odd("fine")
    pid = decoder._process.pid
    monkeypatch.setattr(media_decoder, "WAIT_S", 0.2)  # it never answers, however long it has
    with pytest.raises(Overloaded, match="send the request again") as told:
        odd("sleep")
    assert told.value.retryable
    assert not is_alive(pid)


def test_a_process_that_is_held_up_answers_late_and_not_wrongly(decoder, odd, monkeypatch):
    """However long it stands still, that is none of a processor's time."""
    monkeypatch.setattr(media_decoder, "PROCESSOR_S", 1)
    odd("fine")
    pid = decoder._process.pid
    known = decoder.begin("image", "stop", "stop".encode)
    deadline = time.monotonic() + 60
    while state(pid) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(TimeoutError):
        known.result(timeout=1.5)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(InvalidMedia, match="went on"):
        known.result(timeout=200)
    assert decoder._process.pid == pid


@pytest.mark.parametrize("what", ["sleep", "burn"])
def test_a_decoder_closes_at_once_whatever_its_process_does(odd, decoder, what):
    odd("fine")
    pid = decoder._process.pid
    begun = threading.Event()

    def data():
        begun.set()
        return what.encode()

    known, waiting = decoder.begin("image", what, data), decoder.begin("image", "fine ", "fine".encode)
    assert begun.wait(60)
    decoder.close()
    assert not is_alive(pid)
    assert isinstance(known.exception(timeout=0), ShuttingDown)
    assert waiting.cancelled()


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
