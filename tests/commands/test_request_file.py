"""What `d3serve submit` reads: JSON lines and CSV, plain and compressed, from files and from what is read once."""

import gzip
import io
import os
import threading
from types import SimpleNamespace

import pytest

from d3serve.commands import request_file
from d3serve.commands.request_file import STDIN, RequestFile
from d3serve.errors import InvalidRequest

QUESTIONS = {"q": {"type": "noul", "instructions": "x"}}
JSONL = b'{"custom_id": "a", "state": "one"}\r\n\n{"state": {"n": 2}}\n'
CSV = b'custom_id,state\r\na,"one, ""two"""\r\n\r\nb,"three\nfour"\r\n'


def read(path, questions=QUESTIONS, **options):
    with RequestFile(path, questions, **options) as file:
        first = list(file.lines())
        assert [line.identity for line in file.lines()] == [line.identity for line in first], (
            "read twice is the same"
        )
        return first


def told(lines):
    return [(line.number, line.custom_id, line.body and line.body["state"]) for line in lines]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "mark"])
def test_a_file_is_read_whatever_is_put_around_it(pack, mark, tmp_path):
    lines, table = tmp_path / "r.jsonl.gz", tmp_path / "r.csv"
    lines.write_bytes(pack(mark + JSONL))
    table.write_bytes(pack(mark + CSV))
    assert told(read(lines)) == [(1, "a", "one"), (3, None, {"n": 2})]
    assert told(read(table)) == [(2, "a", 'one, "two"'), (4, "b", "three\nfour")]
    assert all("custom_id" not in line.body for line in read(lines)), "the API knows no such field"


@pytest.mark.parametrize("text", [JSONL, gzip.compress(JSONL, mtime=0)])
def test_standard_input_and_a_pipe_are_read_as_a_file_is(text, tmp_path, monkeypatch):
    monkeypatch.setattr(request_file.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    assert told(read(STDIN)) == [(1, "a", "one"), (3, None, {"n": 2})]
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(text,))
    writer.start()
    assert told(read(tmp_path / "pipe")) == [(1, "a", "one"), (3, None, {"n": 2})]
    writer.join()


def test_columns_without_a_state_are_one_together(tmp_path):
    table = tmp_path / "r.csv"
    table.write_text("custom_id,title,body\n7,Hello,\n")
    (line,) = read(table)
    assert (line.custom_id, line.body) == (
        "7", {"state": {"title": "Hello", "body": ""}, "questions": QUESTIONS},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"state,custom_id,note\nx,1,y\n", 'only `custom_id` may stand beside it, not "note"'),
        (b"custom_id\n1\n", "no column that makes a state"),
        (b"", "no column that makes a state"),
        (b"a,a\n1,2\n", 'two columns "a"'),
        (b"state\n\xff\n", "no CSV in UTF-8"),
        (b'state\n"x', "no CSV in UTF-8"),
        (gzip.compress(b"state\nx\n" * 999, mtime=0)[:-20], "cannot read"),
    ],
)
def test_a_table_that_makes_no_requests_is_refused_whole(text, words, tmp_path):
    table = tmp_path / "r.csv"
    table.write_bytes(text)
    with pytest.raises(InvalidRequest, match=words):
        read(table)


def test_a_table_without_questions_says_how_to_ask(tmp_path):
    (tmp_path / "r.csv").write_text("state\nx\n")
    with pytest.raises(InvalidRequest, match="--questions, --yes-no, --choice or --score"):
        read(tmp_path / "r.csv", {})


def test_a_row_of_too_few_values_is_refused_by_its_number_and_the_others_are_read(tmp_path):
    (tmp_path / "r.csv").write_text("state,custom_id\nx,1\ny\nz,3\n")
    first, second, third = read(tmp_path / "r.csv")
    assert (first.body["state"], third.body["state"]) == ("x", "z")
    assert "line 3: it has 1 values under 2 columns" in second.refusal.message


@pytest.mark.parametrize("value", ["1", '""', "null_", "true", '["a"]', '"' + "x" * 513 + '"'])
def test_a_custom_id_that_is_no_text_is_refused_by_its_line(value, tmp_path):
    (tmp_path / "r.jsonl").write_text(f'{{"custom_id": {value}, "state": "x"}}\n')
    (line,) = read(tmp_path / "r.jsonl")
    assert line.refusal is not None
    assert "line 1" in line.refusal.message


def test_a_line_without_end_is_refused_and_the_next_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(request_file, "MAX_LINE_BYTES", 100)
    (tmp_path / "r.jsonl").write_bytes(b'{"state": "' + b"x" * 1000 + b'"}\n' + b'{"state": "y"}\n')
    long, next_one = read(tmp_path / "r.jsonl")
    assert "longer than 100 bytes" in long.refusal.message
    assert (next_one.number, next_one.body["state"]) == (2, "y")


def test_a_line_is_known_by_what_it_asks_and_not_by_its_place(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"state": 1}\n{"state": 2}\n{"state": 1}\n')
    one, two, again = (line.identity for line in read(path))
    assert len({one, two, again}) == 3
    path.write_bytes(b'{"state": 2}\n\n{"state":  1}\n')
    assert [line.identity for line in read(path)] == [two, one]
    assert [line.identity for line in read(path, {"other": QUESTIONS["q"]})] != [two, one]
