"""*Ask*: a request worded in the page, its answers, and the same request as code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

STATE = 'It\'s $5 `off`, "really" \\ twice.\nSecond line: ünï 日本語 🙂'


def sent(page):
    """The text of the next job that the page posts."""
    return page.expect_request(lambda request: request.method == "POST" and request.url.endswith("/v1/jobs"))


def box(page, name):
    return page.get_by_role("textbox", name=name, exact=True)


def ask(page):
    page.get_by_role("button", name="Ask", exact=True).click()


def test_without_a_mouse(page, take_turns, claimed):
    press, typed = page.keyboard.press, page.keyboard.type
    on = "document.activeElement.{}"

    def tab_to(what, backwards=False):
        for _ in range(60):
            press("Shift+Tab" if backwards else "Tab")
            if page.evaluate(f"element => {on.format(what[0])} === element", what[1]):
                return
        raise AssertionError(f"no way to {what} by the keyboard")

    press("Tab")
    assert page.evaluate(on.format("className")) == "skip"
    press("Enter")
    assert page.evaluate(on.format("id")) == "main"
    tab_to(("getAttribute('aria-labelledby')", "state-title"))
    typed("The parcel is late.")
    tab_to(("placeholder", "Does the customer ask for a refund?"))
    typed("Is it late?")
    tab_to(("textContent", "+ Choice question: add one"))
    press("Enter")
    expect(page.get_by_placeholder("Which team should take it?")).to_be_focused()
    typed("Which team?")
    tab_to(("getAttribute('aria-label')", "Option 1"))
    typed("billing")
    tab_to(("getAttribute('aria-label')", "Option 2"))
    typed("shipping")
    press("Enter")  # another option, as in a list
    expect(box(page, "Option 3")).to_be_focused()
    typed("accounts")
    tab_to(("value", "noul"), backwards=True)  # a radio button: the kind of the first question
    press("ArrowRight")
    expect(page.get_by_role("radio", name="Choice").first).to_be_checked()
    press("ArrowLeft")
    with take_turns():
        press("Control+Enter")
        expect(page.get_by_role("status").filter(has_text="Answered.")).to_have_text(
            "Answered. Is it late?: yes. Which team?: accounts."
        )
    [(state, questions)] = claimed
    assert state == "=The parcel is late."
    assert json.loads(questions) == {
        "Is it late?": {"type": "noul", "instructions": "Is it late?"},
        "Which team?": {
            "type": "choice", "instructions": "Which team?",
            "criteria": {"billing": None, "shipping": None, "accounts": None},
        },
    }  # fmt: skip


def test_answers_are_bars_with_probability_and_confidence(page, take_turns):
    page.get_by_role("button", name="Fill in an example").click()
    with take_turns():
        ask(page)
        answers = page.locator(".answer")
        expect(answers).to_have_count(3)
    refund, team, urgency = (answers.nth(place).inner_text() for place in range(3))
    assert "75.0%" in refund
    assert "25.0%" in refund
    assert "accounts" in team
    assert "confidence 0.500" in team
    assert "1.50 of 2" in urgency
    expect(page.locator(".outcome")).to_contain_text("9 tokens, read once")
    widths = (
        page.locator(".answer")
        .nth(1)
        .locator(".bar i")
        .evaluate_all("all => all.map(i => i.style.inlineSize)")
    )
    assert widths == ["75%", "12.5%", "12.5%"]


def test_options_keep_their_order_and_json_its_digits(page, take_turns, claimed):
    page.get_by_text("JSON", exact=True).click()
    state = '{"b": 12345678901234567890, "a": [1.0, 1e2], "10": null}'
    box(page, "State").fill(state)
    page.get_by_text("Choice", exact=True).first.click()
    box(page, "Question 1").fill("How many?")
    for place, name in enumerate(("10", "2")):
        box(page, f"Option {place + 1}").fill(name)
    with take_turns(), sent(page) as request:
        ask(page)
        expect(page.locator(".answer")).to_have_count(1)
    assert state in request.value.post_data
    assert list(json.loads(claimed[0][1])["How many?"]["criteria"]) == ["10", "2"]


def test_what_is_not_finished_is_said_before_it_is_sent(page):
    def refused(told):
        ask(page)
        expect(page.get_by_role("alert")).to_contain_text(told)

    refused("Question 1 asks nothing yet.")
    page.get_by_text("Score", exact=True).first.click()
    refused("Question 1 needs at least 2 levels.")
    for place in (1, 2):
        box(page, f"Level {place}").fill("low")
    refused("“low” stands twice among the levels of question 1.")
    page.get_by_text("JSON", exact=True).click()
    refused("The state is no JSON")


def test_on_a_phone_the_answers_come_into_view(open_tab, service, worker, take_turns):  # noqa: ARG001 - who serves
    page = open_tab(service, width=390).go()
    page.get_by_role("button", name="Fill in an example").click()
    with take_turns():
        ask(page)
        expect(page.locator(".answer").first).to_be_in_viewport()


def test_a_refusal_is_told_in_words(open_tab, service, worker):  # noqa: ARG001 - who serves a model
    page = open_tab(service, expected={422}).go()
    page.get_by_role("button", name="Fill in an example").click()
    box(page, "Question 2").fill("")
    box(page, "Option 1").fill("\u200b")  # which the page takes for a name, and the API for none
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("blank")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()


LATE_FRAMES = """
    window.requestAnimationFrame = () => 0;
    const later = window.setTimeout;
    window.setTimeout = (call, ms, ...rest) => later(call, Math.max(ms ?? 0, 1_000), ...rest);
"""


@pytest.fixture
def busy_page(tab, worker):
    """A page of a browser that is too busy to draw a frame, and to do what waits for one, for seconds."""
    worker.show_itself(modalities=("text", "image"))
    tab.page.add_init_script(LATE_FRAMES)
    return tab.go()


def come_back(page):
    """Look at *Jobs* and come back."""
    page.evaluate("location.hash = '#/jobs'")
    page.get_by_role("heading", name="Jobs", exact=True).wait_for()
    page.evaluate("location.hash = '#/ask'")
    page.get_by_role("heading", name="Ask", exact=True).wait_for()


def test_what_was_done_last_outlasts_the_page_that_was_left_at_once(busy_page):
    page = busy_page
    box(page, "State").fill("mine")
    come_back(page)
    assert box(page, "State").input_value() == "mine"
    page.get_by_role("button", name="Fill in an example").click()
    page.get_by_role("button", name="Bring back what stood here").click()
    come_back(page)
    assert box(page, "State").input_value() == "mine"
    box(page, "State").fill("mine, and more")
    page.reload()
    assert box(page, "State").input_value() == "mine, and more"


def test_keys_go_where_the_page_leads_before_it_is_drawn(busy_page):
    page, press, typed = busy_page, busy_page.keyboard.press, busy_page.keyboard.type
    page.get_by_role("button", name="Choice question").press("Enter")
    typed("Which team?")
    assert box(page, "Question 2").input_value() == "Which team?"
    box(page, "Option 1").press("Enter")
    typed("billing")
    assert box(page, "Option 2").input_value() == "billing"
    page.get_by_role("button", name="Key", exact=True).press("Enter")
    typed("a-key")
    assert page.get_by_label("Key", exact=True).and_(page.locator("input")).input_value() == "a-key"
    press("Escape")
    come_back(page)
    box(page, "State").focus()
    frames_come = "new Promise(done => setTimeout(() => setTimeout(() => setTimeout(done))))"
    page.evaluate(frames_come)
    expect(box(page, "State")).to_be_focused()


def test_pictures_are_added_to_what_the_draft_has_become(busy_page, png, tmp_path):
    page, picker = busy_page, busy_page.locator("input[type=file]")
    page.evaluate(
        "() => { const read = FileReader.prototype.readAsDataURL, waiting = window.waiting = [];"
        " FileReader.prototype.readAsDataURL = function (file) { waiting.push(() => read.call(this, file)); }; }"
    )
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png)
        picker.set_input_files(tmp_path / name)
    page.wait_for_function("waiting.length === 2")
    box(page, "State").fill("typed meanwhile")
    come_back(page)
    page.evaluate("waiting.forEach(read => read())")
    expect(page.locator(".picture")).to_have_count(2)
    assert box(page, "State").input_value() == "typed meanwhile"
    page.get_by_role("button", name="Remove a.png").click()
    expect(page.locator(".picture figcaption")).to_contain_text("b.png")


def test_a_draft_outlasts_a_look_at_another_page(page):
    box(page, "State").fill("kept")
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    page.get_by_role("link", name="Ask", exact=True).click()
    expect(box(page, "State")).to_have_value("kept")
    page.reload()
    expect(box(page, "State")).to_have_value("kept")
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('full'); }; }")
    box(page, "State").fill("too large for the tab")
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    page.get_by_role("link", name="Ask", exact=True).click()
    expect(box(page, "State")).to_have_value("too large for the tab")
    page.reload()
    expect(box(page, "State")).to_have_value("")  # rather than what was there before


# --- the same as code ------------------------------------------------------------------------------


def word(page, *, files=()):
    """A request with all kinds of questions and awkward letters; gives each form of its code."""
    page.get_by_role("button", name="Fill in an example").click()
    box(page, "State").fill(STATE)
    box(page, "Question 1").fill('Isn\'t it "$HOME"?')
    if files:
        page.locator("input[type=file]").set_input_files(files)
        expect(page.locator(".picture")).to_have_count(len(files))
    return codes(page)


def codes(page):
    found = {}
    for form in ("curl", "Python", "CLI"):
        page.locator(".code-card").get_by_text(form, exact=True).click()
        found[form] = page.locator(".code-card pre").inner_text()
    return found


def run(form, code, folder):
    command = [sys.executable, "-c", code] if form == "Python" else ["bash", "-euo", "pipefail", "-c", code]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=env, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr + done.stdout


def asked_alike(page, take_turns, claimed, folder, found):
    with take_turns():
        ask(page)
        expect(page.locator(".answers")).to_be_visible()
        for form, code in found.items():
            run(form, code, folder)
    assert len(claimed) == 4
    for _, questions in claimed[1:]:
        assert json.loads(questions) == json.loads(claimed[0][1])
    assert {state for state, _ in claimed} == {claimed[0][0]}


def test_each_form_of_the_code_asks_the_same(page, take_turns, claimed, tmp_path):
    found = word(page)
    asked_alike(page, take_turns, claimed, tmp_path, found)
    assert claimed[0][0] == f"={STATE}"


def test_code_of_a_json_state_asks_the_same(page, take_turns, claimed, tmp_path):
    word(page)
    page.locator(".ask-form").get_by_text("JSON", exact=True).click()
    state = json.dumps({"text": STATE, "old": None, "open": True, "quoted": "null \\u0041", "n": 1.50})
    box(page, "State").fill(state)
    asked_alike(page, take_turns, claimed, tmp_path, codes(page))
    assert json.loads(claimed[0][0]) == json.loads(state)


def test_simple_questions_are_flags_of_the_command(page):
    box(page, "State").fill("x")
    box(page, "Question 1").fill("Is it late?")
    assert codes(page)["CLI"].splitlines()[1:] == ["  --state 'x' \\", "  --yes-no 'Is it late?'"]
    page.get_by_role("button", name="Choice question").click()
    box(page, "Question 2").fill("Which one?")
    for place, name in enumerate(("a", "b")):
        box(page, f"Option {place + 1}").fill(name)
    assert codes(page)["CLI"].splitlines()[-1] == "  --choice 'Which one?: a | b'"
    box(page, "Option 2").fill("b: c")
    assert codes(page)["CLI"].splitlines()[2].startswith("  --questions '{")


def test_pictures_are_sent_where_the_model_takes_them(
    png, open_tab, service, worker, take_turns, claimed, tmp_path
):
    worker.show_itself(modalities=("text", "image"))
    page = open_tab(service).go()
    (tmp_path / "a photo.png").write_bytes(png)
    found = word(page, files=[tmp_path / "a photo.png"])
    with sent(page) as request:
        asked_alike(page, take_turns, claimed, tmp_path, found)
    [image] = json.loads(request.value.post_data)["images"]
    assert image.startswith("data:image/png;base64,iVBOR")


def test_a_file_that_cannot_be_read_is_named(png, open_tab, service, worker, tmp_path):
    worker.show_itself(modalities=("text", "image"))
    tab = open_tab(service)
    tab.page.add_init_script(
        "FileReader.prototype.readAsDataURL = function () { setTimeout(this.onerror); };"
    )
    page = tab.go()
    (tmp_path / "gone.png").write_bytes(png)
    page.locator("input[type=file]").set_input_files(tmp_path / "gone.png")
    expect(page.get_by_role("alert")).to_contain_text("gone.png cannot be read")


@pytest.mark.parametrize("allowed", [True, False])
def test_code_is_copied_with_a_clipboard_and_without(allowed, page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    if not allowed:
        page.evaluate(
            "() => { navigator.clipboard.writeText = () => Promise.reject(new DOMException('no')); }"
        )
    box(page, "State").fill(STATE + "w" * 50_000)
    box(page, "Question 1").fill("Is it?")
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.count("w") > 50_000
    shown = page.locator(".code-card pre").text_content()
    assert len(shown) < 25_000, "a browser lays out what it shows with each key that is pressed"
    assert copied.startswith(shown.removesuffix("…"))


def test_a_model_of_texts_is_offered_no_pictures(page):
    expect(page.get_by_text("Model, lane, priority, webhook")).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="vllm-sr/d3-tiny")).to_be_visible()
    expect(page.locator("input[type=file]")).to_have_count(0)
