"""Server-sent events are read by the HTML standard, wherever the network cuts the bytes."""

import itertools

import pytest

from d3serve.client.events import EventReader, Lines

STREAM = (
    "\ufeff: hello\r\n"
    "id: 1.0.0\revent: queued\r"
    'data: {"note":"日本\u2028\u2029\x85é🔑"}\r\r'
    ": still here\n\n"
    "retry: 1500\r\nunknown: x\r\nevent\r\ndata: [1,\r\ndata:2]\r\nid: 1.1.0\r\n\r\n"
    "event: empty\n\n"
    "id: a\0b\nid\nid: 1.4.0\nevent:done\ndata: null\n\n"
    "event: after\ndata: 1\n\n"
).encode()


def read(chunks):
    reader = EventReader()
    found = [event for chunk in chunks for event in ([] if reader.ended else reader.feed(chunk))]
    return [(event.id, event.name, event.data) for event in found], reader


EXPECTED = [
    ("1.0.0", "queued", {"note": "日本\u2028\u2029\x85é🔑"}),
    ("1.1.0", "message", [1, 2]),
    ("1.4.0", "done", None),
]


def test_a_stream_in_one_piece():
    events, reader = read([STREAM])
    assert events == EXPECTED
    assert (reader.ended, reader.last_id, reader.retry_s) == (True, "1.4.0", 1.5)


def test_a_stream_cut_anywhere():
    for place in range(len(STREAM) + 1):
        assert read([STREAM[:place], STREAM[place:]])[0] == EXPECTED, place
    assert read([bytes([byte]) for byte in STREAM])[0] == EXPECTED
    assert read([b"", *itertools.chain.from_iterable((bytes([byte]), b"") for byte in STREAM)])[0] == EXPECTED


def test_an_event_that_was_cut_off_is_forgotten_at_a_reconnection():
    reader = EventReader()
    assert list(reader.feed(b"id: 1\nevent: a\ndata: 1\n\nid: 2\nevent: b\ndata: [")) != []
    assert reader.reconnect()["Last-Event-ID"] == "1"
    assert [(e.name, e.data) for e in reader.feed(b"\xef\xbb\xbfdata: 3\n\n")] == [("message", 3)]


def test_a_line_ended_by_a_carriage_return_is_told_at_once():
    lines = Lines()
    assert list(lines.feed(b"a\r")) == ["a"]
    assert list(lines.feed(b"\nb\n")) == ["b"]


@pytest.mark.parametrize(
    ("text", "pause_s"), [(b"5", 0.005), (b"9" * 40, 60.0), (b"-1", 0), (b"\xd9\xa1", 0)]
)
def test_a_server_chooses_the_pause_within_reason(text, pause_s):
    reader = EventReader()
    assert list(reader.feed(b"retry: " + text + b"\n")) == []
    assert reader.retry_s == pause_s
