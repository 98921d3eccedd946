"""A receiver on loopback that answers as told, and the sender with the job table on a real server."""

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from d3serve.schemas import DecisionRequest, DecisionResponse, JobError, JobOptions, Usage, WebhookTarget
from d3serve.schemas.questions import NoulAnswer, NoulQuestion
from d3serve.settings import Settings
from d3serve.store.jobs import JobStore
from d3serve.store.turns import TurnStore
from d3serve.webhooks.egress import EgressPolicy
from d3serve.webhooks.outbound import Outbound
from d3serve.webhooks.outbox import HookStore
from d3serve.webhooks.sender import Sender

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def settings(redis_url, raw_redis):  # noqa: ARG001 - the server is emptied first
    return Settings(redis_url=redis_url, webhook_allow=("127.0.0.0/8",))


@dataclass
class Got:
    """One request as it came."""

    headers: dict
    body: bytes

    @property
    def event(self):
        return json.loads(self.body)


@dataclass
class Receiver:
    """Answers in turn what `answers` holds (status, headers), then 200; `hang` keeps it silent until set."""

    answers: list = field(default_factory=list)
    got: list = field(default_factory=list)
    hang: threading.Event | None = None
    arrived: threading.Condition = field(default_factory=threading.Condition)
    url: str = ""

    def wait_for(self, count, timeout=60):
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.got) >= count, timeout), (
                f"{len(self.got)} of {count}"
            )
        return self.got


@pytest.fixture
def make_receiver():
    servers, hangs = [], []

    def make(*answers, hang=False, port=0):
        receiver = Receiver(list(answers), hang=threading.Event() if hang else None)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with receiver.arrived:
                    receiver.got.append(Got(dict(self.headers), body))
                    status, headers = receiver.answers.pop(0) if receiver.answers else (200, {})
                    receiver.arrived.notify_all()
                if receiver.hang is not None:
                    receiver.hang.wait(90)
                    return
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        receiver.url = f"http://127.0.0.1:{server.server_port}/hook"
        servers.append(server)
        hangs.append(receiver.hang)
        return receiver

    yield make
    for hang in filter(None, hangs):
        hang.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
async def store(settings):
    async with JobStore.open(settings) as opened:
        yield opened


@pytest.fixture
async def hooks(settings):
    opened = HookStore.open(settings)
    yield opened
    await opened.aclose()


@pytest.fixture
def turns(settings):
    opened = TurnStore.open(settings, "hand:1")
    yield opened
    opened.close()


@pytest.fixture
def finish_job(store, turns):
    """Submits a job with a webhook and ends it; gives its id."""

    async def finish(target, *, failed=False, size=1):
        question = NoulQuestion(type="noul", instructions="x")
        questions = {f"q{i}": question for i in range(size)}
        options = JobOptions(webhook=WebhookTarget(**target), metadata={"case": "7"})
        request = DecisionRequest(model="m", state="secret", questions=questions, job=options)
        submitted = await store.submit(request, tenant="acme", traceparent=TRACE)
        turn = turns.claim(1)
        if failed:
            assert turns.fail(turn.lease, submitted.job_id, JobError(code="device_error", message="broken"))
        else:
            usage = Usage(
                input_tokens=1, computed_tokens=1, state_tokens=1, state_cached=False, questions=size
            )
            answers = dict.fromkeys(questions, NoulAnswer(noul=0.5))
            response = DecisionResponse(model="m", answers=answers, usage=usage)
            assert turns.succeed(turn.lease, submitted.job_id, response)
        turns.free(turn.lease, "back")
        return submitted.job_id

    return finish


@pytest.fixture
def sender_of(settings):
    """A sender at work in this loop while a block runs."""

    @contextlib.asynccontextmanager
    async def run(hooks, outbound=None):
        stop = asyncio.Event()
        outbound = outbound or Outbound(EgressPolicy(settings.webhook_allow), 1.0)
        running = asyncio.create_task(Sender(hooks, outbound).run(stop))
        yield running
        stop.set()
        await running

    return run


@pytest.fixture
async def sender(sender_of, hooks):
    """The sender at work in this loop."""
    async with sender_of(hooks) as running:
        yield running
