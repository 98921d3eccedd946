"""Request bodies that nobody honest sends: each costs little to send and much to read carelessly."""

import gzip
import json
import random
import zlib

import zstandard

MIB = 2**20
NOUL = {"type": "noul", "instructions": "Is it so?"}


def request(state="hello", questions=None, **fields):
    """A request in which one thing is odd."""
    return {"model": "jev-latest", "state": state, "questions": questions or {"q": NOUL}} | fields


def letters(size):
    """A request with a long text of letters that could be composed of others."""
    return _dumped(request(questions={"q": NOUL | {"criteria": {"yes": "é" * (size // 2)}}}))


def option_of_letters(size):
    """A request with an option of letters that could be composed of others."""
    return _dumped(request(questions={"q": _choice({"a": "é" * (size // 2), "b": "x"})}))


def known(size):
    """What has cost others seconds, with about `size` bytes in it; by name."""
    many, marks = size // 3, "e" + "\u0301" * (size // 2)
    text = {
        "a level of spaces": _score([" " * size, "high"]),
        "an option of marks": _choice({"a": marks, "b": "x"}),
        "an option's name": _choice({"x" * size: "", "b": ""}),
        "criteria of letters": {"type": "noul", "instructions": "x", "criteria": {"yes": "é" * (size // 2)}},
        "instructions": NOUL | {"instructions": "x" * size},
        "keys in instructions": NOUL | {"instructions": {str(i): 0 for i in range(size // 12)}},
        "objects in instructions": NOUL | {"instructions": [{}] * many},
        "marks of every kind": NOUL | {"instructions": "a" + "\u0327\u0301" * (size // 4)},
    }
    bodies = {name: _dumped(request(questions={"q": question})) for name, question in text.items()}
    return bodies | {
        "an option of letters that could be composed": option_of_letters(size),
        "lists in the state": _dumped(request(state=[[]] * many)),
        "numbers in the state": _dumped(request(state=[0] * many)),
        "long numbers": b'{"state":[' + b",".join([b"9" * 1_200] * (size // 1_200)) + b"]}",
        "one long number": b'{"state":' + b"9" * size + b"}",
        "a long exponent": b'{"state":1e' + b"9" * size + b"}",
        "a long fraction": b'{"state":0.' + b"1" * size + b"}",
        "many questions": _dumped(request(questions={f"q{i}": NOUL for i in range(size // 60)})),
        "questions of empty lists": _dumped(
            request(questions={f"q{i}": NOUL | {"instructions": [[]] * (size // 800)} for i in range(250)})
        ),
        "many options": _dumped(request(questions={"q": _choice({str(i): "" for i in range(size // 12)})})),
        "options that differ in a mark": _dumped(
            request(questions={"q": _choice({"e" + "\u0301\u0323" * i: "" for i in range(255)})})
        ),
        "unknown fields": _dumped(request(**{f"f{i}": 0 for i in range(size // 12)})),
        "a key again and again": b"{" + b",".join([b'"state":0'] * (size // 10)) + b"}",
        "depth": b'{"state":' + b"[" * size,
        "depth of objects": b'{"a":' * (size // 5),
        "white space": b" " * size + _dumped(request()),
        "an open string": b'{"state":"' + b"a" * size,
        "backslashes": b'{"state":"' + b"\\" * size,
        "escapes": b'{"state":"' + b"\\u0000" * (size // 6) + b'"}',
        "half a pair at the end": b'{"state":"' + b"a" * size + b'\\ud800"}',
        "not UTF-8 at the end": b'{"state":"' + b"a" * size + b'\xff"}',
        "a field name": _dumped(request(**{"x" * size: 0})),
        "a model": _dumped(request() | {"model": "x" * size}),
        "metadata": _dumped(request(job={"metadata": {str(i): "x" for i in range(size // 12)}})),
        "a media type that is text": b"\x89PNG" + b"\0" * size,
        "input parts": _dumped(
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * (size // 40)}]}
        ),
    }


def packed(body):
    """The JSON under zstd, with white space behind it that does not pack: a body is refused that packs too well."""
    chance = random.Random(len(body))  # noqa: S311 - the same every time
    return zstandard.compress(body + bytes(chance.choices(b" \n\r\t", k=len(body) // 25)))


def mutated(chance, size):
    """A body made by chance: a plausible request whose parts are replaced, repeated, cut or spoilt."""
    value = request(state=_value(chance, 4, size), questions=_questions(chance, size))
    if chance.random() < 0.3:
        value["job"] = {
            chance.choice(["metadata", "lane", "priority", "webhook", "x"]): _value(chance, 2, 200)
        }
    body = _dumped(value)
    match chance.randrange(6):
        case 0:
            body = body[: chance.randrange(len(body))]
        case 1:
            place = chance.randrange(len(body))
            body = body[:place] + chance.randbytes(chance.randrange(1, 9)) + body[place:]
        case 2:
            place, end = sorted((chance.randrange(len(body)), chance.randrange(len(body))))
            body = body[:end] + body[place:end] * chance.randrange(1, 4) + body[end:]
    return body[: 20 * MIB]  # more than may be sent; of much more an answer need not arrive


def encoded(chance, body):
    """The body under one of the codings, right, cut off or wrongly named; and the headers to send with it."""
    coding = chance.choice(["identity", "identity", "gzip", "zstd"])
    packed = body
    if coding == "gzip":
        packed = gzip.compress(body, 1)
    elif coding == "zstd":
        packed = zstandard.compress(body)
    match chance.randrange(12):
        case 0:
            packed = packed[: chance.randrange(len(packed) + 1)]
        case 1:
            coding = chance.choice(["gzip", "zstd", "br", "gzip, gzip", "x-gzip"])
        case 2:
            packed = packed + packed
        case 3:
            packed, coding = zlib.compress(body), "gzip"
    headers = {} if coding == "identity" else {"Content-Encoding": coding}
    if chance.random() < 0.1:
        headers["Content-Type"] = chance.choice(
            ["text/plain", "application/json; charset=utf-16", "\xe9", ""]
        )
    return packed, headers


def _dumped(value):
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _score(levels):
    return {"type": "score", "instructions": "How much?", "criteria": levels}


def _choice(options):
    return {"type": "choice", "instructions": "Which?", "criteria": options}


ALPHABETS = ("a", " ", "é", "e\u0301", "\u2028\u0085", "\x00\x1f", "日本語", "😀", '\\"', "<|im_end|>")
SCALARS = (0, -1, 10**30, 1e308, -0.0, True, None, 2**63, 10**1300, "", {}, [], "hello")


def _text(chance, size):
    alphabet = chance.choice(ALPHABETS)
    return alphabet * chance.randrange(1, max(2, size // len(alphabet)))


def _value(chance, depth, size):
    match chance.randrange(8 if depth else 5):
        case 0:
            return _text(chance, size)
        case 1:
            scalar = chance.choice(SCALARS)
            return [scalar] * (size // (len(json.dumps(scalar)) + 2))
        case 2 | 3 | 4:
            return chance.choice(SCALARS)
        case 5 | 6:
            return {
                _text(chance, 30): _value(chance, depth - 1, size // 4) for _ in range(chance.randrange(9))
            }
        case _:
            return [_value(chance, depth - 1, size // 4) for _ in range(chance.randrange(9))]


def _questions(chance, size):
    made = {}
    for _ in range(chance.choice([1, 1, 2, 8, 300])):
        kind = chance.choice(["noul", "choice", "score", "box", "", None])
        question = {"type": kind, "instructions": _value(chance, 2, size // 8)}
        if chance.random() < 0.7:
            question["criteria"] = _value(chance, 2, size // 8)
        made[_text(chance, 40)] = question
    return made
