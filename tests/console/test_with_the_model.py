"""The whole of it once, as an operator starts it: `d3serve up` with the bundled checkpoint, and every page.

With `WRITE_IMAGES=1` it also writes the pictures in docs/images, as of a machine with nothing else to do.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from PIL import Image
from playwright.sync_api import expect

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
CASES, FEW = ROOT / "docs" / "evaluation", 12
READY = re.compile(r"d3serve is ready: (http://\S+)")
READY_WITHIN_S = 180
STATE = "RSS and Atom feed reader for the text console, with support for podcasts, HTML rendering and filters"
SECTIONS = ("games", "network tools", "libraries", "mathematics")
LEVELS = ("none", "1 or 2", "3 to 6", "7 or more")


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """The address of `d3serve up` with demo-d3."""
    folder = tmp_path_factory.mktemp("up")
    command = [
        sys.executable,
        "-m",
        "d3serve",
        "up",
        "--port",
        "0",
        "--model",
        ROOT / "checkpoints" / "demo-d3",
    ]
    log = folder / "up.log"
    with log.open("wb") as sink:
        process = subprocess.Popen([*command, "--data-dir", folder], stderr=sink, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_WITHIN_S
        while not (found := READY.search(log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture
def picture():
    """Writes a picture of what a tab shows, if asked to: in 256 colours, small enough for a repository."""

    def take(page, name):
        if "WRITE_IMAGES" not in os.environ:
            return
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.wait_for_timeout(500)  # bars grow to their length
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        IMAGES.mkdir(exist_ok=True)
        shot.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            IMAGES / f"{name}.png", optimize=True
        )

    return take


def test_every_page_with_real_answers(up, open_tab, picture):
    for number in range(40):  # a queue that has seen something
        body = {
            "model": "jev-latest", "state": f"{STATE}, version {number % 9}",
            "questions": {f"q{n}": {"type": "noul", "instructions": f"Is it {n}?"} for n in range(1 + number % 7)},
            "job": {"lane": "offline" if number % 5 == 4 else "interactive"},
        }  # fmt: skip
        wait = {"Prefer": "wait=60"} if number == 39 else {}
        httpx.post(f"{up}/v1/jobs", json=body, headers=wait, timeout=90).raise_for_status()
    tab = open_tab(up, height=900, sharp=2)
    page = tab.go()
    assert httpx.get(up, headers={"Accept": "text/html"}, follow_redirects=True).url.path == "/console"
    word(page)
    page.get_by_role("button", name="Ask", exact=True).click()
    answers = page.locator(".answer")
    expect(answers).to_have_count(3)
    expect(answers.nth(1).locator(".decided")).to_have_text("network tools")
    expect(answers.first.locator(".decided")).to_have_text("yes")
    picture(page, "console")
    job_link = page.get_by_role("link", name="Job", exact=True)
    job_id = job_link.get_attribute("href").rpartition("/")[2]
    job_link.click()
    expect(page.locator(".answer")).to_have_count(3)
    expect(page.get_by_role("region", name="Time line")).to_contain_text("of it in the engine")
    picture(page, "console-job")
    page.get_by_role("link", name="Jobs", exact=True).first.click()
    expect(page.locator("table.jobs tbody tr")).to_have_count(25)
    picture(page, "console-jobs")
    page.get_by_role("link", name="Queue", exact=True).click()
    expect(page.get_by_role("region", name="Worker d3@")).to_contain_text("demo-d3")
    for told in ("Memory", "Host memory, peak", "State cache", "of 268 MB"):
        expect(page.get_by_role("region", name="Worker d3@")).to_contain_text(told)
    [at_work] = httpx.get(f"{up}/v1/workers").json()["data"]
    assert 0 < at_work["cached_bytes"] <= at_work["cache_size_bytes"] == 2**28
    assert 2**26 < at_work["memory_bytes"] < 1.1 * at_work["peak_memory_bytes"]
    assert at_work["memory_total_bytes"] is None
    picture(page, "console-queue")
    phone = open_tab(up, width=390, height=844, scheme="dark", sharp=2)
    small = phone.go(f"jobs/{job_id}")
    expect(small.locator(".answer")).to_have_count(3)
    assert phone.fits()
    picture(small, "console-phone")


def test_the_page_of_an_evaluation(up, open_tab, picture, tmp_path):
    """As the bundled checkpoint does on packages that it has never seen: on all of them for the picture, else a few."""
    shutil.copytree(CASES, tmp_path, dirs_exist_ok=True)
    if "WRITE_IMAGES" not in os.environ:
        lines = (tmp_path / "packages.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "packages.jsonl").write_text("".join(lines[:FEW]))
    command = [sys.executable, "-m", "d3serve", "evaluate", "packages.jsonl", "--questions", "questions.json",
               "--against", "reworded.json", "--html", "page.html", "--url", up]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=240)
    written = tmp_path / "page.html"
    assert done.returncode == 0, done.stderr + done.stdout
    page = open_tab(written.as_uri(), width=1100, height=1560).page
    page.goto(written.as_uri())
    expect(page.get_by_role("heading", name="How good are the answers?")).to_be_visible()
    expect(page.get_by_role("heading", name="questions.json against reworded.json")).to_be_visible()
    assert page.locator("svg").first.bounding_box()["width"] > 200
    picture(page, "evaluation")


def word(page):
    box = lambda name: page.get_by_role("textbox", name=name, exact=True)  # noqa: E731
    box("State").fill(STATE)
    box("Question 1").fill("Does the package need a network?")
    box("Name in the answer").fill("network")
    for kind, text, name, options in (
        ("Choice", "Which section?", "section", SECTIONS),
        ("Score", "How many packages does it depend on?", "dependencies", LEVELS),
    ):
        page.get_by_role("button", name=f"{kind} question").click()
        card = page.locator(".question").last
        card.locator("textarea").fill(text)
        card.get_by_role("textbox", name="Name in the answer").fill(name)
        for place, option in enumerate(options):
            if place >= 2:
                card.locator(".options > button").click()
            card.locator(".option-name").nth(place).fill(option)
