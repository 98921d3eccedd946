"""The API on a real Redis-protocol server, in process or on a socket; a hand-driven worker stands in for the model.

Fixtures, for the conftest.py of each folder that calls the API.
"""

import asyncio
import contextlib
import json
import socket
import threading

import httpx
import hypothesis
import pytest
import uvicorn

from d3serve.api.app import create_app
from d3serve.schemas import DecisionResponse, JobError, ModelInfo, Usage
from d3serve.schemas.questions import ChoiceAnswer, NoulAnswer, ScoreAnswer
from d3serve.settings import Settings
from d3serve.store.connect import end_tasks
from d3serve.store.counting import CountQueue
from d3serve.store.turns import TurnStore
from d3serve.worker.counting import Counter
from d3serve.worker.fake_engine import FakeEngine

hypothesis.settings.register_profile("api", deadline=None)  # a busy machine is no bug
hypothesis.settings.load_profile("api")

ENDS_WITHIN_S = 60  # what a server has left; it takes milliseconds where the machine is free
MODEL = ModelInfo(
    name="vllm-sr/d3-tiny",
    revision="abc123",
    identity="abc123 float32",
    attention_mode="prefix_bidir",
    prompt_layout="state-first",
    validated_length=32_768,
    max_length=131_072,
    dtype="float32",
    device="cpu",
)


@pytest.fixture
def settings(redis_url, raw_redis):  # noqa: ARG001 - the server is emptied first
    return Settings(redis_url=redis_url)


def answer(question):
    """Three quarters for the last option, the rest shared by the others."""
    criteria = question.get("criteria") or {}
    probabilities = [0.25 / max(1, len(criteria) - 1)] * (len(criteria) - 1) + [0.75]
    match question["type"]:
        case "noul":
            return NoulAnswer(noul=0.75)
        case "choice":
            named = dict(zip(criteria, probabilities, strict=True))
            return ChoiceAnswer(choice=list(criteria)[-1], probabilities=named, confidence=0.5)
        case _:
            places = [str(place) for place in range(len(criteria))]
            texts = [level if isinstance(level, str) else json.dumps(level) for level in criteria]
            return ScoreAnswer(
                score=1.5, confidence=0.5, legend=dict(zip(places, texts, strict=True)),
                probabilities=dict(zip(places, probabilities, strict=True)),
            )  # fmt: skip


class HandWorker:
    """Takes turns when told to."""

    def __init__(self, settings):
        self.turns = TurnStore.open(settings, "hand:1")
        self.turns.lease_s = 5

    def show_itself(self, load="loaded", **model):
        self.model = MODEL.model_copy(update=model)
        self.turns.publish({
            "load": load, "model": self.model.model_dump_json(), "pid": 1, "host": "here",
            "lanes": "interactive,offline", "tokens_per_s": 1000,
        })  # fmt: skip

    def claim(self):
        return self.turns.claim(1)

    def finish(self, turn):
        for job in turn.jobs:
            answers = {name: answer(question) for name, question in json.loads(job.questions).items()}
            usage = Usage(
                input_tokens=20,
                computed_tokens=20,
                state_tokens=9,
                state_cached=False,
                questions=len(answers),
            )
            response = DecisionResponse(model=self.model.full_name, answers=answers, usage=usage)
            self.turns.succeed(turn.lease, job.id, response, identity=self.model.identity)
        self.turns.free(turn.lease, "back")

    def fail(self, turn, code, message):
        for job in turn.jobs:
            assert self.turns.fail(turn.lease, job.id, JobError(code=code, message=message))
        self.turns.free(turn.lease, "back")

    def work(self):
        """One turn: claim what waits, answer it; returns what was claimed."""
        turn = self.claim()
        self.finish(turn)
        return turn.jobs

    def run(self, stop, delay_s=0.0):
        """Take turns until `stop` is set; each takes `delay_s`."""
        while not stop.wait(0.005):
            turn = self.claim()
            if turn.jobs and not stop.wait(delay_s):
                self.finish(turn)


@pytest.fixture
def worker(settings, monkeypatch):
    monkeypatch.setattr("d3serve.store.turns.WORKER_TTL_MS", 600_000)  # it shows itself once
    hand = HandWorker(settings)
    hand.show_itself()
    yield hand
    hand.turns.close()


@pytest.fixture
def take_turns(worker):
    """Lets the worker take turns in a thread."""

    @contextlib.contextmanager
    def turns(delay_s=0.0):
        stop = threading.Event()
        thread = threading.Thread(target=worker.run, args=(stop, delay_s))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    return turns


@pytest.fixture
def counter(settings):
    """A worker's thread that counts."""
    engine = FakeEngine.load(f"fake:?name={MODEL.name}", pass_tokens=16_384, pass_questions=512)
    found = Counter(CountQueue.open(settings), engine, settings)
    found.start()
    yield found
    found.stop()
    found.join(10)


@pytest.fixture
async def app(settings):
    application = create_app(settings)
    async with application.router.lifespan_context(application):
        yield application


@pytest.fixture
async def client(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as http:
        yield http


@pytest.fixture
def stats(app):
    return app.state.parts.store.stats


class PromptServer(uvicorn.Server):
    """Ends when it is told to: uvicorn looks ten times a second, and waits for streams that nobody will end."""

    def __init__(self, config):
        super().__init__(config)
        self._loop, self._told = None, asyncio.Event()

    async def main_loop(self):
        self._loop = asyncio.get_running_loop()
        if not await self.on_tick(0):
            await self._told.wait()

    async def shutdown(self, sockets=None):
        for closing in (*self.servers, *(sockets or ())):
            closing.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - uvicorn's own
                    await asyncio.sleep(0.002)
        await self.lifespan.shutdown()

    async def serve(self, sockets=None):
        """Leave no task to the end of the loop: it cancels each once, and waits for ever for one that did not hear."""
        try:
            await super().serve(sockets)
        finally:
            await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})

    def end(self):
        """Of any thread."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told.set)


@contextlib.contextmanager
def _serving(application):
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, log_config=None, access_log=False)
    server, broke = PromptServer(config), []

    def run():
        try:
            server.run(sockets=[listener])
        except Exception as error:  # told by the test whose server it is; pytest blames whichever runs now
            broke.append(error)

    thread = threading.Thread(target=run, daemon=True)  # else one that hangs would also keep the process
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.end()
        thread.join(ENDS_WITHIN_S)
        listener.close()
    assert not thread.is_alive(), (
        "the server's thread hangs: its loop may not close for a connection left open"
    )
    assert broke == []


@pytest.fixture
def serving():
    """Puts an app on a real socket of loopback, in a thread of its own; gives its address."""
    return _serving


@pytest.fixture
def service(settings):
    """The address of the API on loopback."""
    with _serving(create_app(settings)) as address:
        yield address
