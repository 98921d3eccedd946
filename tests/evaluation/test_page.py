"""The page is one file that runs nothing, asks no host, and shows any text as text."""

import re
from html.parser import HTMLParser

import pytest
from making import choice, noul

from d3serve.evaluation.judged import Judged, JudgedAnswers
from d3serve.evaluation.page import render
from d3serve.evaluation.report import evaluate, read_report, set_against
from d3serve.evaluation.yes_no import Wanted

HOSTILE = (
    "</td></title><script>alert(1)</script><img src=http://evil/x onerror=alert(1)>\"'${{7*7}}\u202e\x00$x^2$"
)


class Markup(HTMLParser):
    """The tags of a page, and every attribute that leads somewhere."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.leads = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.leads += [
            value for name, value in attrs if name in {"src", "href", "xlink:href", "data", "action"}
        ]
        assert not [name for name, _ in attrs if name.startswith("on")]


def page_of(text):
    judged = [
        noul(0.9, True, text, text),
        noul(0.2, True, text + "2", text),
        noul(0.1, False, text + "3", text),
        Judged(text, "d1", "c" + text, "choice", (text, "b" + text), (0.9, 0.1), 1, excerpt=text),
        choice((0.2, 0.3, 0.5), 0, text, "s" + text, options=(text, "m", "h"), kind="score"),
    ]
    answers = JudgedAnswers(tuple(judged), (text, "b"), (text,))
    against = set_against(text, answers, text + "2", answers)
    return render(evaluate(text, 5, answers, Wanted(), against), "1.0")


def test_hostile_text_is_no_markup_and_leads_nowhere():
    page = page_of(HOSTILE)
    found = Markup(page)
    assert found.tags == Markup(page_of("plain")).tags
    assert not found.tags & {"script", "img", "iframe", "link", "object", "base", "form"}
    assert all(lead.startswith("#") for lead in found.leads)
    assert "49" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL).split("<body>")[1].replace(
        "0.49", ""
    )
    assert "\u202e" not in page
    assert "\x00" not in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page


def test_nothing_of_it_is_fetched():
    page = page_of("plain")
    assert not re.search(r"@import|url\((?!#)", page)
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_ids_of_several_drawings_do_not_meet():
    ids = re.findall(r'\bid="([^"]+)"', page_of("plain"))
    assert len(ids) > 50
    assert len(ids) == len(set(ids))


def test_a_page_of_one_case_alone_is_drawn():
    page = render(evaluate("cases", 1, JudgedAnswers((noul(1.0, True),), ("m",)), Wanted()), "1.0")
    assert "with one class alone" in page


@pytest.mark.parametrize("number", [1, 3])
def test_a_report_is_read_again_as_what_was_written(tmp_path, number):
    judged = tuple(noul(0.25 * n, n % 2 == 0, f"c{n}") for n in range(number))
    answers = JudgedAnswers(judged, ("m@1",), ("x: failed",))
    path = tmp_path / "report.json"
    against = set_against("a", answers, "b", answers)
    path.write_text(evaluate("cases", 3, answers, Wanted(), against).to_json())
    assert read_report(path) == answers
