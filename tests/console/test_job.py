"""*Job*: a job followed from the queue to its end, and what can be done with it."""

import asyncio
import base64
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from playwright.sync_api import expect
from pydantic import TypeAdapter

from d3serve.media.files import split_state
from d3serve.schemas.questions import Question, value_text
from d3serve.settings import Settings
from d3serve.store.encode import decode_state
from d3serve.webhooks import sender
from d3serve.webhooks.egress import EgressPolicy
from d3serve.webhooks.outbound import Outbound
from d3serve.webhooks.outbox import HookStore
from d3serve.webhooks.sender import Sender

BODY = {
    "model": "jev-latest",
    "state": "hello",
    "questions": {"late": {"type": "noul", "instructions": "Is it late?"}},
}


@pytest.fixture
def settings(redis_url, raw_redis):  # noqa: ARG001 - the server is emptied first
    return Settings(redis_url=redis_url, webhook_allow=("127.0.0.0/8",))


def press(page, name):
    page.get_by_role("button", name=name, exact=True).click()


def test_its_life_is_followed_to_the_answers(post, worker, tab):
    ahead, job_id = post(), post(metadata={"case": "7"})
    page = tab.go(f"jobs/{job_id}")
    life = page.get_by_role("region", name="Time line")
    expect(life.locator("[aria-current]")).to_contain_text("Queued")
    expect(life).to_contain_text("behind 1 job")
    expect(life).to_contain_text("not started")
    turn = worker.claim()
    assert {job.id for job in turn.jobs} == {ahead, job_id}
    expect(life.locator("[aria-current]")).to_contain_text("Pass")
    bar = page.get_by_role("progressbar")
    for share in (0.25, 0.75):
        worker.turns.note_share(turn.lease, [job_id], share, 30)
        expect(life).to_contain_text(f"{share:.0%}, about 30.0 s left")
        expect(bar).to_have_js_property("value", share)
    worker.finish(turn)
    expect(life).to_contain_text("Succeeded")
    expect(bar).to_have_count(0)
    expect(page.locator(".answer")).to_contain_text("75.0%")
    expect(page.get_by_role("region", name="Usage")).to_contain_text("9 tokens, read once")
    expect(page.get_by_role("region", name="Request")).to_contain_text("case")
    expect(page.get_by_role("region", name="State")).to_contain_text("hello")
    expect(page.locator(".answer")).to_contain_text("Is it late?")
    expect(page.get_by_role("status").filter(has_text="The job succeeded.")).to_have_count(1)


def test_a_state_in_json_is_shown_with_the_digits_that_were_sent(service, worker, tab):  # noqa: ARG001 - who serves
    body = '{"model": "jev-latest", "state": {"n": 12345678901234567890, "x": 1.0}, "questions": %s}'
    sent = body % json.dumps(BODY["questions"])
    answer = httpx.post(f"{service}/v1/jobs", content=sent, headers={"Content-Type": "application/json"})
    state = tab.go(f"jobs/{answer.json()['id']}").get_by_role("region", name="State")
    expect(state).to_contain_text('"n": 12345678901234567890')
    expect(state).to_contain_text('"x": 1.0')


def test_a_request_that_is_no_longer_kept_is_missed_in_words(worker, open_tab, service, raw_redis, key):
    body = BODY | {"questions": {"constructor": {"type": "noul", "instructions": "Is it late?"}}}
    job_id = httpx.post(f"{service}/v1/jobs", json=body).json()["id"]
    worker.work()
    raw_redis.delete(key("body", job_id))
    page = open_tab(service, expected={410}).go(f"jobs/{job_id}")
    expect(page.get_by_text("What it was asked is no longer kept.")).to_be_visible()
    expect(page.locator(".answer")).to_have_text("constructoryesyes75.0%no25.0%")
    expect(page.get_by_role("button", name="Ask this again")).to_have_count(0)


def test_a_failure_is_told_in_words_and_retried(post, worker, tab):
    job_id = post()
    worker.fail(worker.claim(), "max_tokens_exceeded", "the state has <b>9</b> tokens too many")
    page = tab.go(f"jobs/{job_id}")
    failure = page.get_by_role("region", name="Why there is no answer")
    expect(failure).to_contain_text("the state has <b>9</b> tokens too many")
    expect(failure).to_contain_text("The same request would fail again.")
    press(page, "Retry")
    expect(failure).to_have_count(0)
    worker.work()
    expect(page.locator(".answer")).to_be_visible()


def test_a_job_that_expires_while_it_is_looked_at_offers_a_retry(post, worker, tab):
    page = tab.go(f"jobs/{post(expires_in_s=1)}")
    life = page.get_by_role("region", name="Time line")
    expect(life.locator("[aria-current]")).to_contain_text("Queued")
    while not worker.turns.reap().ended:  # as workers do each second
        page.wait_for_timeout(100)
    expect(life).to_contain_text("Expired")
    expect(page.get_by_text("This job has no answers.")).to_be_visible()
    expect(page.get_by_role("button", name="Retry")).to_be_enabled()


def test_a_job_is_canceled_and_deleted(post, tab, open_tab):
    job_id = post()
    page = tab.go(f"jobs/{job_id}")
    press(page, "Cancel")
    expect(page.get_by_role("region", name="Time line")).to_contain_text("Canceled")
    press(page, "Delete")
    expect(page.get_by_role("dialog")).to_contain_text("cannot be undone")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    press(page, "Delete")
    press(page, "Keep it")
    expect(page.get_by_role("button", name="Delete")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    gone = open_tab(tab.url, expected={410}).go(f"jobs/{job_id}")
    expect(gone.get_by_role("alert")).to_contain_text("no longer kept")


ODD_STATES = (
    r'{"b": 12345678901234567890, "10": [1.0, 1e2, true, null], "2": "\u0041 \"é\" 🙂"}',
    r'"two\nlines: {1}"',
)
ODD = r"""{
  "model": "jev-latest", "job": {"lane": "offline", "priority": "high"}, "state": %s, "questions": {
    "10": {
      "instructions": "Which one?", "type": "choice", "criteria": {"10": "ten, \"10\"", "2": null, "b": {"x": 1.0}}
    },
    "2": {"type": "score", "instructions": {"ask": "much?", "from": [1, 2.50]}, "criteria": ["<b>little</b>", "much"]},
    "constructor": {"type": "noul", "instructions": null, "criteria": {"true": "it is", "false": null}},
    "Is it?": {"type": "noul", "instructions": "Is it?"}
  } %s}"""


@pytest.mark.parametrize("state", ODD_STATES)
def test_a_job_is_asked_again(state, png, service, worker, tab, take_turns, claimed):
    worker.show_itself(modalities=("text", "image"))
    shown = f', "images": ["data:image/png;base64,{base64.b64encode(png).decode()}"]'
    body = ODD % (state, shown if state.startswith("{") else "")
    answer = httpx.post(f"{service}/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 202, answer.text
    page = tab.go()
    page.get_by_role("textbox", name="State", exact=True).fill("mine")
    page.evaluate(f"location.hash = '#/jobs/{answer.json()['id']}'")
    worker.work()
    press(page, "Ask this again")
    expect(page.get_by_text("The job also showed 1 file")).to_have_count(1 if state.startswith("{") else 0)
    with take_turns():
        press(page, "Ask")
        expect(page.locator(".answer")).to_have_count(4)
    first, again = ([text_of(state), *texts_of(questions)] for state, questions in claimed)
    assert first == again
    job = httpx.get(f"{service}/v1/jobs").json()["data"][0]["request"]
    assert (job["lane"], job["priority"]) == ("offline", "high")
    press(page, "Bring back what stood here")
    expect(page.get_by_role("textbox", name="State", exact=True)).to_have_value("mine")


def text_of(state):
    """The state as a prompt says it, without what it shows."""
    return value_text(decode_state(split_state(state)[0]))


def texts_of(questions):
    """Names of questions, in order, and what a prompt says of each."""
    found = TypeAdapter(dict[str, Question]).validate_json(questions)
    return [
        (name, one.type, value_text(one.instructions or ""), *one.options()) for name, one in found.items()
    ]


def test_no_such_job(open_tab, service, worker):  # noqa: ARG001 - who serves a model
    page = open_tab(service, expected={404}).go("jobs/job_none%2F..%2F")
    expect(page.get_by_role("alert")).to_contain_text("job_none")
    expect(page.get_by_role("button", name="Delete")).to_have_count(0)


# --- its webhook -----------------------------------------------------------------------------------


@pytest.fixture
def receiver():
    """The address of somebody who answers 500 once, then 200."""
    answers = [500]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(answers.pop() if answers else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/<i>hook</i>"
        server.shutdown()


@pytest.fixture
def sending(settings, monkeypatch):
    """Sends webhooks in a thread while the test runs; none of them a second time by itself."""
    monkeypatch.setattr(sender, "SCHEDULE_S", (600,))
    stop, loops = threading.Event(), []

    async def send():
        loops.append(asyncio.get_running_loop())
        ended = asyncio.Event()
        loops.append(ended)
        async with contextlib.aclosing(HookStore.open(settings)) as hooks:
            stop.set()
            await Sender(hooks, Outbound(EgressPolicy(settings.webhook_allow), 5.0)).run(ended)

    thread = threading.Thread(target=lambda: asyncio.run(send()))
    thread.start()
    assert stop.wait(30)
    yield
    loop, ended = loops
    loop.call_soon_threadsafe(ended.set)
    thread.join()


def test_a_delivery_that_failed_is_sent_again(post, worker, tab, receiver, sending):  # noqa: ARG001
    job_id = post(webhook={"url": receiver})
    worker.work()
    page = tab.go(f"jobs/{job_id}")
    deliveries = page.get_by_role("region", name="Webhook deliveries")
    expect(deliveries).to_contain_text("1 try")
    expect(deliveries).to_contain_text("Pending")
    expect(deliveries).to_contain_text("job.succeeded")
    expect(deliveries).to_contain_text("<i>hook</i>")
    deliveries.get_by_text("Tries").click()
    expect(deliveries).to_contain_text("500")
    deliveries.get_by_role("button", name="Redeliver").click()
    expect(deliveries).to_contain_text("Delivered")
    expect(deliveries).to_contain_text("2 tries")
    expect(deliveries.get_by_role("button", name="Redeliver")).to_have_count(0)


def test_a_job_without_a_webhook_has_no_deliveries(post, worker, tab):
    job_id = post()
    worker.work()
    with tab.page.expect_response(lambda answer: "webhook-deliveries" in answer.url) as answer:
        page = tab.go(f"jobs/{job_id}")
        expect(page.locator(".answer")).to_be_visible()
    assert json.loads(answer.value.body())["data"] == []
    expect(page.get_by_role("region", name="Webhook deliveries")).to_have_count(0)
