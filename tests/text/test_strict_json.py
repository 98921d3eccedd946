import contextlib
import gzip
import json
import math
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from d3serve.errors import DuplicateKey, InvalidJSON
from d3serve.text.strict_json import MAX_VALUES, is_short_beside_strings, read_json
from d3serve.text.wording import shown

DEPTH = 100

REFUSED = {
    "NaN": (b'{"state":NaN}', "NaN is not JSON"),
    "Infinity": (b'{"state":[1,-Infinity]}', "-Infinity is not JSON"),
    "a float past the largest": (b'{"state":1e999}', '"1e999" is too large'),
    "a negative one": (b"[-1e999]", "too large"),
    "an integer of 5,000 digits": (b'{"state":' + b"9" * 5000 + b"}", "more digits"),
    "an integer of 1,235 digits": (b'{"state":' + b"9" * 1235 + b"}", "more digits"),
    "half a surrogate pair in a value": (b'{"state":"\\ud83d"}', '"state" holds \\ud83d'),
    "the other half": (b'{"state":"\\ude00x"}', "\\ude00"),
    "upper-case escapes": (b'{"state":"\\uD83D"}', "\\ud83d"),
    "two first halves": (b'{"state":"\\ud83d\\ud83d"}', "\\ud83d"),
    "half a pair in a key": (b'{"\\ud83d":1}', "\\ud83d"),
    "half a pair deep inside": (b'{"state":[{"a":["\\udfff"]}]}', '"state"'),
    "half a pair in a nested key": (b'{"state":{"a":{"\\udfff":1}}}', '"state"'),
    "a raw surrogate in the bytes": (b'{"state":"\xed\xa0\xbd"}', "not UTF-8: byte 10"),
    "Latin-1": ('{"state":"é"}'.encode("latin-1"), "not UTF-8"),
    "an overlong encoding": (b'{"state":"\xc0\xaf"}', "not UTF-8"),
    "UTF-16": ('{"state":1}'.encode("utf-16"), "not UTF-8"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "a raw newline in a string": (b'{"state":"a\nb"}', "line 1 column"),
    "a raw NUL in a string": (b'{"state":"a\x00b"}', "line 1 column"),
    "a trailing comma": (b'{"a":1,}', "line 1 column"),
    "a comment": (b'{"a":1}//', "Extra data"),
    "single quotes": (b"{'a':1}", "line 1 column"),
    "two values": (b"{}{}", "Extra data"),
    "half an object": (b'{"a":', "line 1 column"),
    "an unterminated string": (b'{"a":"', "line 1 column"),
    "101 levels": (b"[" * 101 + b"]" * 101, "deeper than 100 levels"),
    "1,000 levels": (b"[" * 1000 + b"]" * 1000, "deeper than 100 levels"),
    "20,000 levels of objects": (b'{"a":' * 20_000 + b"1" + b"}" * 20_000, "deeper than 100 levels"),
    "20,000 openers": (b"[" * 20_000, "deeper than 100 levels"),
    "one value too many": (b"[" + b"0," * MAX_VALUES + b"0]", "more than 262,144 values"),
    "objects without end": (b"[" + b"{}," * MAX_VALUES + b"{}]", "more than 262,144 values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    body, reason = REFUSED[name]
    with pytest.raises(InvalidJSON) as caught:
        read_json(body, max_depth=DEPTH)
    assert reason in caught.value.message
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "body", [b'{"a":1,"a":2}', b'{"q":{"x":1,"y":2,"x":3}}', b'[{"a":{},"\\u0061":{}}]', b'{"":1,"":1}']
)
def test_a_key_given_twice_is_refused_by_name(body):
    with pytest.raises(DuplicateKey, match="stands twice") as caught:
        read_json(body, max_depth=DEPTH)
    assert caught.value.code == "duplicate_key"


@pytest.mark.parametrize(
    "text",
    [
        '{"b":1,"a":{"x":1.0,"y":1e22,"z":0.1}}',
        '{"t":"é\u2028\u2029😀"}',
        '{"n":1000000000000000000000000000000}',
        "9" * 1234,
        "[true,null,-0.0,0,1E5]",
        '"a\\u0000b\\r\\n\\r\\t\\ufeff"',
        '"\\ud83d\\ude00"',
        '{"__proto__":1,"a.b":2,"../x":3}',
        '"' + " " * 100_000 + '"',
    ],
)
def test_what_is_read_is_what_was_sent(text):
    value = read_json(text.encode(), max_depth=DEPTH)
    assert json.dumps(value, ensure_ascii=False) == json.dumps(json.loads(text), ensure_ascii=False)


def test_key_order_is_kept():
    names = [str(7919 * i % 1009) for i in range(500)]
    body = json.dumps(dict.fromkeys(names)).encode()
    assert list(read_json(body, max_depth=DEPTH)) == names


def test_exactly_the_allowed_depth_passes():
    assert read_json(b"[" * DEPTH + b"]" * DEPTH, max_depth=DEPTH) is not None
    assert read_json(b'{"a":' * 4 + b"[1]" + b"}" * 4, max_depth=5) is not None
    with pytest.raises(InvalidJSON, match="deeper than 4"):
        read_json(b'{"a":' * 4 + b"[1]" + b"}" * 4, max_depth=4)


def test_brackets_and_commas_inside_strings_count_for_nothing():
    text = json.dumps({"state": "[" * 5000 + "," * 2_000_000 + '\\"{'})
    assert read_json(text.encode(), max_depth=DEPTH)["state"].startswith("[[")


@pytest.mark.parametrize("hostile", [b'"' + b'\\"' * 2_000_000, b'["' + b"\\" * 4_000_001, b'"' * 4_000_000])
def test_hostile_strings_cost_linear_time(hostile):
    began = time.process_time()
    with pytest.raises(InvalidJSON):
        read_json(b"[" * 200 + hostile, max_depth=DEPTH)
    assert time.process_time() - began < 2.0  # a quadratic scan of 4 MB takes hours


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES, st.booleans())
def test_every_json_value_survives_and_can_be_written_again(value, ascii_only):
    read = read_json(json.dumps(value, ensure_ascii=ascii_only).encode(), max_depth=DEPTH)
    assert json.dumps(read) == json.dumps(value)
    assert json.dumps(read, ensure_ascii=False, allow_nan=False).encode()


@given(st.recursive(st.text(st.characters()), lambda inner: st.lists(inner, min_size=1, max_size=3)))
def test_a_value_that_no_utf8_can_hold_is_refused(value):
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(InvalidJSON, match="surrogate"):
            read_json(json.dumps(value).encode(), max_depth=DEPTH)
    else:
        assert read_json(json.dumps(value).encode(), max_depth=DEPTH) == value


@settings(max_examples=400)
@given(st.binary(max_size=200) | st.text('[]{}",:\\ud8a01e9.-+NaInfty ', max_size=80).map(str.encode))
@example(b"[" * 99 + b'"')
@example(gzip.compress(b"{}"))
def test_any_bytes_give_a_writable_value_or_a_refusal(body):
    with contextlib.suppress(InvalidJSON):
        json.dumps(read_json(body, max_depth=DEPTH), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    "value", ["\n" * 500, "é" * 500, {"a": 1}, [1], None, True, math.pi, 10**400, "\x1b[31m"]
)
def test_what_is_shown_of_a_value_is_short_and_harmless(value):
    text = shown(value)
    assert len(text) <= 60
    assert text.replace("…", "").isascii()
    assert text.isprintable()


TEXTS = st.text(st.sampled_from(list('ab\\"\n,[é😀')), max_size=12)


@given(
    st.recursive(TEXTS | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)),
    st.booleans(),
    st.floats(0, 1),
)
@example(["\\", [[], []]], False, 1)  # a quote behind a backslash that is escaped itself ends the string
@example(['\\"', [[], []]], False, 1)
def test_what_stands_beside_strings_is_measured_to_the_byte(value, escaped, share):
    body = json.dumps(value, ensure_ascii=escaped).encode()
    body = body[: round(share * len(body))]
    beside = len(re.sub(rb'"(?:[^"\\]|\\.)*"?', b"", body, flags=re.DOTALL)) + body.count(b'"')
    if body.endswith(b"\\"):  # cut within an escape, whose string is then not looked at to its end
        return
    assert is_short_beside_strings(body, beside)
    assert not is_short_beside_strings(body, beside - 1) or beside == 0
