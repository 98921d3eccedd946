"""Whatever stands in a job: markup is text, any script reads its own way, and nothing breaks the page."""

import re

import httpx
import pytest
from playwright.sync_api import expect

MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TEXTS = {
    "markup": MARKUP,
    "template": "${document.title='owned'} {{7*7}} <%= 7*7 %>",
    "address": "javascript:document.title='owned'",
    "arabic": "هل يطلب العميل استرداد المبلغ؟",
    "turned": "a\u202etxt.exe",
    "long": "w" * 190,
}


@pytest.fixture
def asked(service, worker):
    """A job whose every text is one of those; its id."""

    def ask(text):
        criteria = {text: text, f"{text} 2": None}
        questions = {
            text: {"type": "choice", "instructions": text, "criteria": criteria},
            f"{text} s": {"type": "score", "instructions": text, "criteria": [text, f"{text}!"]},
        }
        job = {"metadata": {text[:60]: text}}
        body = {"model": "jev-latest", "state": {text: text}, "questions": questions, "job": job}
        answer = httpx.post(f"{service}/v1/jobs", json=body)
        assert answer.status_code == 202, answer.text
        worker.work()
        return answer.json()["id"]

    return ask


def test_a_text_is_shown_as_it_is(asked, open_tab, service):
    tab = open_tab(service, width=390)
    for text in TEXTS.values():
        page = tab.go(f"jobs/{asked(text)}")
        expect(page.locator(".answer h3").first).to_have_text(text)
        assert page.locator(".bar-name").first.text_content() in {text, f"{text} 2"}
        assert page.locator("main :is(img, script, iframe)").count() == 0
        assert page.locator("a[href^='javascript']").count() == 0
        assert "owned" not in page.title()
        assert tab.fits(), text
        assert page.locator(".answer h3").first.get_attribute("dir") == "auto"


def test_an_arabic_question_reads_from_the_right(asked, tab):
    page = tab.go(f"jobs/{asked(TEXTS['arabic'])}")
    heading = page.locator(".answer h3").first
    expect(heading).to_be_visible()
    assert heading.evaluate("element => getComputedStyle(element).direction") == "rtl"


def test_what_is_typed_on_the_page_is_text_too(tab, worker, take_turns):  # noqa: ARG001 - who serves a model
    page = tab.go()
    page.get_by_role("textbox", name="State", exact=True).fill(MARKUP)
    page.get_by_role("textbox", name="Question 1", exact=True).fill(MARKUP)
    with take_turns():
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator(".answer h3")).to_have_text(MARKUP)
    assert page.locator("main :is(img, script)").count() == 0
    assert "owned" not in page.title()


def test_the_policy_stops_what_a_fault_would_let_in(tab, worker):  # noqa: ARG001 - who serves a model
    page = tab.go()
    tried = page.evaluate(
        """() => {
          const refused = [];
          document.addEventListener("securitypolicyviolation", (event) => refused.push(event.violatedDirective));
          const attempt = (act) => { try { act(); } catch (error) { refused.push(error.name); } };
          attempt(() => { document.createElement("p").innerHTML = "<b>x</b>"; });
          attempt(() => { document.createElement("script").textContent = "document.title = 'owned'"; });
          const style = document.createElement("style");
          style.textContent = "body { display: none }";
          document.head.append(style);
          return new Promise((done) => setTimeout(() => done(refused)));
        }"""
    )
    assert tried.count("TypeError") == 2, "neither markup nor a script is made of text"
    assert "style-src-elem" in tried
    tab.provoked = True  # the browser tells of each


def test_each_page_fits_a_phone_and_every_control_has_a_name(asked, worker, open_tab, service):
    tab = open_tab(service, width=320)  # of the smallest phones, and of a window enlarged four times
    worker.turns.publish(
        {"memory_bytes": 71 * 10**9, "memory_total_bytes": 151 * 10**9, "cache_size_bytes": 38 * 10**9}
    )
    for place in ("ask", "jobs", f"jobs/{asked('Is it?')}", "queue"):
        page = tab.go(place)
        page.wait_for_load_state("networkidle")
        if place == "ask":
            page.get_by_role("button", name="Fill in an example").click()
            page.get_by_text("Model, lane, priority, webhook").click()
        assert tab.fits(), place
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea, a, summary, progress")]
              .filter((one) => !(one.labels?.length || one.ariaLabel || one.getAttribute("aria-labelledby")
                || one.textContent.trim()))
              .map((one) => one.outerHTML)"""
        )
        assert nameless == [], place
        assert page.locator("h1").count() == 1


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_it_follows_the_colours_of_the_system(scheme, dark, open_tab, service):
    page = open_tab(service, scheme=scheme).go()
    colour = page.locator("body").evaluate("element => getComputedStyle(element).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 384) is dark
