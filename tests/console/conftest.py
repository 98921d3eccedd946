"""The console in a real Chromium, on a real API; a hand-driven worker stands in for the model."""

import os
import shutil
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import expect, sync_playwright
from service import HandWorker, service, serving, settings, take_turns

from d3serve.store import turns
from d3serve.store.keys import Keys

__all__ = ["service", "serving", "settings", "take_turns"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WITHIN_MS = 60_000  # a busy machine is no bug
expect.set_options(timeout=WITHIN_MS)


@pytest.fixture(scope="module")  # no longer: while Playwright waits, no other test may run an event loop
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("needs Chromium, as of `apt-get install chromium`")
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def worker(settings, monkeypatch):
    """A hand-driven worker that has the patience of a browser on a busy machine."""
    monkeypatch.setattr(turns, "WORKER_TTL_MS", 10 * WITHIN_MS)
    hand = HandWorker(settings)
    hand.turns.lease_s = 10 * WITHIN_MS / 1000
    hand.show_itself()
    yield hand
    hand.turns.close()


class Tab:
    """A tab with the console, and all that it complained of or asked other hosts for."""

    def __init__(self, context, url):
        self.url, self.complaints, self.refusals = url, [], set()
        self.provoked = False  # whether complaints are what the test is about
        context.on("request", self._heed_request)
        context.on("response", self._heed_response)
        self.page = context.new_page()
        self.page.set_default_timeout(WITHIN_MS)
        self.page.on("console", self._heed_message)
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))

    def _heed_request(self, request):
        if not request.url.startswith(("data:", self.url)):
            self.complaints.append(f"asked for {request.url}")

    def _heed_response(self, response):
        if response.status >= 400:
            self.refusals.add((urlsplit(response.url).path, response.status))

    def _heed_message(self, message):
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.complaints.append(f"{message.type}: {message.text}")

    def go(self, place="ask"):
        """Open a page by what stands after `#/`."""
        self.page.goto(f"{self.url}/console#/{place}")
        self.page.wait_for_selector("main h1")
        return self.page

    def fits(self):
        """Whether nothing is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture
def open_tab(browser):
    """Opens the console at an address. At the end of the test: no complaint, and no refusal that it did not expect."""
    opened = []

    def open_(url, *, width=1280, height=844, scheme="light", sharp=1, expected=()):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=sharp, locale="en-GB",
        )  # fmt: skip
        opened.append((Tab(context, url), context, set(expected)))
        return opened[-1][0]

    yield open_
    for tab, context, expected in opened:
        assert tab.provoked or tab.complaints == []
        assert {status for _, status in tab.refusals} <= expected, tab.refusals
        context.close()


@pytest.fixture
def tab(open_tab, service):
    return open_tab(service)


@pytest.fixture
def page(tab, worker):  # noqa: ARG001 - who serves a model
    return tab.go()


@pytest.fixture
def post(service, worker, request):  # noqa: ARG001 - who serves a model
    """Posts the job that a file's tests look at; its id."""

    def send(**job):
        answer = httpx.post(f"{service}/v1/jobs", json=request.module.BODY | {"job": job})
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    return send


@pytest.fixture
def png():
    """A picture of one pixel."""
    return bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010806000000" "1f15c4890000000d49444154789c63f8cfc0f01f0005000"
        "1ff5c6a3f6d0000000049454e44ae426082"
    )  # fmt: skip


@pytest.fixture
def key(settings):
    return Keys(settings.namespace)


@pytest.fixture
def claimed(monkeypatch):
    """What each job asked, in the order in which the worker took them: state and questions as they were stored."""
    asked = []
    claim = HandWorker.claim

    def noting(self):
        turn = claim(self)
        asked.extend((job.state, job.questions) for job in turn.jobs)
        return turn

    monkeypatch.setattr(HandWorker, "claim", noting)
    return asked
