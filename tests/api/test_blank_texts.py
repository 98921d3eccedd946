"""What leaves no mark, by the regular expression that is quick and by Unicode's own table."""

import sys
import unicodedata

from d3serve.api.validation import _composed
from d3serve.schemas.questions import BLANK

MARKLESS = ("Zs", "Zl", "Zp", "Cc", "Cf")
UNKNOWN = "Cn"  # to this Python's table, which may be older than Unicode 15


def test_a_text_is_blank_where_unicode_says_that_it_leaves_no_mark():
    apart = [
        hex(code)
        for code in range(sys.maxunicode + 1)
        if (kind := unicodedata.category(chr(code))) != UNKNOWN
        and (BLANK.fullmatch(chr(code)) is not None) != (kind in MARKLESS)
    ]
    assert apart == []
    assert BLANK.fullmatch(" \u200b\t" * 10_000)
    assert not BLANK.fullmatch(" " * 10_000 + "x")


def test_accents_are_one_however_they_are_written_and_no_run_of_marks_takes_long():
    assert _composed("e\u0301") == "é" == _composed("é")
    endless = "e" + "\u0316\u0301" * 500_000  # in an order that takes quadratic time to mend
    assert _composed(endless) is endless
