"""Nobody answers, a connection is cut, or a server asks for patience: the page says so, and goes on by itself."""

import contextlib
import json
import socket
import socketserver
import threading
from collections import Counter
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import expect

BODY = {
    "model": "jev-latest",
    "state": "hello",
    "questions": {"late": {"type": "noul", "instructions": "Is it late?"}},
}
SILENCE = "The server does not answer. This page tries again by itself."


class Line:
    """What a browser reaches a server through; it can be cut, as a cable can."""

    def __init__(self, address):
        self._to = (urlsplit(address).hostname, urlsplit(address).port)
        self._ends = set()
        self._server = self._listen(0)
        self.address = "http://{}:{}".format(*self._server.server_address)

    def _listen(self, port):
        line = self

        class Through(socketserver.BaseRequestHandler):
            def handle(self):
                with socket.create_connection(line._to) as there:
                    line._ends |= {self.request, there}
                    back = threading.Thread(target=carry, args=(there, self.request), daemon=True)
                    back.start()
                    carry(self.request, there)
                    back.join()
                    line._ends -= {self.request, there}

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = daemon_threads = True

        server = Server(("127.0.0.1", port), Through)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def cut(self):
        """End every connection in its middle, and take no other."""
        self._server.shutdown()
        self._server.server_close()
        for end in list(self._ends):
            shut(end)

    def mend(self):
        self._server = self._listen(urlsplit(self.address).port)


def carry(source, sink):
    """Carry bytes until either end is shut, and shut the other."""
    with contextlib.suppress(OSError):
        while some := source.recv(2**16):
            sink.sendall(some)
    shut(source)
    shut(sink)


def shut(end):
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def line(service):
    line = Line(service)
    yield line
    line.cut()


def test_a_job_is_followed_over_connections_that_are_cut(post, worker, open_tab, line):
    job_id, other = post(), post()
    tab = open_tab(line.address)
    page = tab.go(f"jobs/{job_id}")
    life = page.get_by_role("region", name="Time line")
    turn = worker.claim()
    expect(life.locator("[aria-current]")).to_contain_text("Pass")
    line.cut()
    expect(page.get_by_role("alert")).to_contain_text(SILENCE)
    expect(life.locator("[aria-current]")).to_contain_text("Pass")
    worker.finish(turn)
    line.mend()
    expect(life).to_contain_text("Succeeded")
    expect(page.locator(".answer")).to_contain_text("75.0%")
    expect(page.get_by_role("alert")).to_have_count(0)
    line.cut()
    page.evaluate(f"location.hash = '#/jobs/{other}'")
    expect(page.get_by_role("heading", name=other)).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text(SILENCE)
    line.mend()
    expect(page.locator(".answer")).to_contain_text("75.0%")
    expect(page.get_by_role("region", name="State")).to_contain_text("hello")
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize(
    ("place", "parts"),  # of the queue each is read every two seconds, of a job once
    [("jobs/{}", ("include=request", "webhook-deliveries")), ("queue", ("v1/queue", "v1/workers"))],
)
def test_an_outage_that_meets_several_parts_of_a_page_is_said_once(place, parts, post, worker, tab):
    job_id = post()
    worker.work()
    page = tab.go(place.format(job_id))
    expect(page.get_by_role("region", name="Workers" if place == "queue" else "State")).to_be_visible()
    refused = Counter()

    def refuse(route):
        refused.update(part for part in parts if part in route.request.url)
        route.abort()

    for part in parts:
        page.route(f"**/*{part}*", refuse)
    if place != "queue":
        page.reload()
    while min(refused[part] for part in parts) < 2:  # then the page has shown what became of the first
        page.wait_for_event("requestfailed")
    expect(page.get_by_role("alert")).to_have_count(1)
    expect(page.get_by_role("alert")).to_contain_text(SILENCE)
    page.unroute_all()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_answers_come_over_a_connection_that_is_cut(worker, open_tab, line):
    page = open_tab(line.address).go()
    page.get_by_role("button", name="Fill in an example").click()
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("link", name="Job", exact=True)).to_be_visible()
    turn = worker.claim()
    expect(page.get_by_role("status").filter(has_text="The job runs.")).to_have_count(1)
    line.cut()
    expect(page.locator(".outcome").get_by_role("alert")).to_contain_text(SILENCE)
    worker.finish(turn)
    line.mend()
    expect(page.locator(".answer")).to_have_count(3)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()


def test_a_server_that_asks_for_patience_gets_it(post, worker, open_tab, service):
    job_id = post()
    worker.work()
    refusals = {1: (503, "Redis is away"), 2: (429, "too many requests")}
    page = open_tab(service, expected={503, 429}).page
    asked = Counter()

    def refuse_twice(route):
        asked[route.request.url] += 1
        if asked[route.request.url] not in refusals:
            return route.continue_()
        status, told = refusals[asked[route.request.url]]
        body = json.dumps({"detail": told, "code": "later", "errors": []})
        return route.fulfill(status=status, body=body, headers={"Retry-After": "1"})

    page.route("**/v1/**", refuse_twice)
    page.goto(f"{service}/console#/jobs/{job_id}")
    expect(page.get_by_role("alert")).to_contain_text("Redis is away. This page tries again by itself.")
    expect(page.get_by_role("alert")).to_contain_text("Too many requests.")
    expect(page.locator(".answer")).to_contain_text("75.0%")
    expect(page.get_by_role("region", name="State")).to_contain_text("hello")
    expect(page.get_by_role("status").filter(has_text="vllm-sr/d3-tiny")).to_have_count(1)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_request_that_got_no_answer_is_one_job_when_it_is_sent_again(open_tab, service, take_turns):
    page, tries = open_tab(service, expected={429}).go(), []

    def answer(route):
        tries.append(route.request.headers["idempotency-key"])
        if len(tries) == 1:
            told = {"detail": "100 jobs wait already", "code": "queue_full", "errors": []}
            route.fulfill(status=429, body=json.dumps(told), headers={"Retry-After": "30"})
        elif len(tries) == 2:
            route.fetch()  # the job is made
            route.abort()
        else:
            route.continue_()

    page.route("**/v1/jobs", answer)
    page.get_by_role("button", name="Fill in an example").click()
    ask = page.get_by_role("button", name="Ask", exact=True)
    ask.click()
    expect(page.get_by_role("alert")).to_contain_text("100 jobs wait already. Try again in 30 seconds.")
    ask.click()
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer.")
    ask.click()
    expect(page.get_by_role("button", name="Asking…")).to_be_disabled()
    state = page.get_by_role("textbox", name="State", exact=True)
    state.press("Control+Enter")  # which asks too, but not while there is no answer
    with take_turns():
        expect(page.locator(".answer")).to_have_count(3)
    assert len(tries) == 3
    assert len(httpx.get(f"{service}/v1/jobs").json()["data"]) == 1
    state.fill("another")
    with take_turns():
        ask.click()
        expect(page.get_by_role("button", name="Asking…")).to_have_count(0)
        expect(page.locator(".answer")).to_have_count(3)
    assert tries[0] == tries[1] == tries[2] != tries[3]


def test_what_is_no_answer_of_the_api_is_told_in_words(open_tab, service):
    tab = open_tab(service)
    tab.page.route("**/v1/**", lambda route: route.fulfill(body="<h1>Sign in</h1>", content_type="text/html"))
    page = tab.go("queue")
    expect(page.get_by_role("alert")).to_contain_text("What answers here is not this API.")


def test_a_place_in_the_queue_is_told_as_it_changes(post, tab):
    first, job_id = post(), post()
    tab.page.clock.install()
    life = tab.go(f"jobs/{job_id}").get_by_role("region", name="Time line")
    expect(life).to_contain_text("behind 1 job")
    httpx.post(f"{tab.url}/v1/jobs/{first}/cancel").raise_for_status()
    tab.page.clock.fast_forward(5_000)
    expect(life).not_to_contain_text("behind")
