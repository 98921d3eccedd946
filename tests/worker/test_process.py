"""Whatever goes wrong between loading a model and serving it, the main process hears of it."""

import asyncio
import os

import pytest

from d3serve.errors import InvalidSettings
from d3serve.model import hub
from d3serve.schemas import DecisionRequest
from d3serve.schemas.questions import NoulQuestion
from d3serve.settings import Settings
from d3serve.store.connect import open_sync
from d3serve.store.jobs import JobStore
from d3serve.store.keys import Keys
from d3serve.store.turns import TurnStore
from d3serve.wake.celery_app import Waker
from d3serve.worker import process
from d3serve.worker.engines import load_engine, served_name
from d3serve.worker.fake_engine import FakeEngine
from d3serve.worker.process import MAX_LOADS, TurnProcess
from d3serve.worker.turn import TurnReport


@pytest.fixture
def settings(redis_url):
    return Settings(redis_url=redis_url, model="fake:")


@pytest.fixture
def published(settings):
    store = TurnStore.open(settings, "d3@here-1")
    yield store.published
    store.close()


def test_a_loaded_model_is_told(settings, published):
    TurnProcess(settings, "d3@here-1").load()
    assert published("load", "loads", "error") == ["loaded", "0", ""]


@pytest.mark.parametrize("broken", ["load_engine", "TurnRunner", "Waker"])
def test_a_failure_after_the_model_is_read_is_no_silence(broken, settings, published, monkeypatch):
    tries = []

    def fail(*_):
        tries.append(1)
        raise RuntimeError("no such luck")

    monkeypatch.setattr(process, broken, fail)
    child = TurnProcess(settings, "d3@here-1")
    child.load()
    assert published("load", "error") == ["failed", "RuntimeError: no such luck"]
    assert len(tries) == MAX_LOADS
    child.run_turns()  # and has nothing to run


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({"serves": "another", "load": "loaded"}, True),
        ({"serves": "another", "load": "loading"}, True),  # it loads again after a crash
        ({"serves": "another", "load": "failed"}, False),
        ({"serves": "fake", "load": "loaded"}, False),
        ({"load": "loading"}, False),
    ],
)
def test_a_queue_has_one_model(said, refused, settings, published):
    other = TurnStore.open(settings, "d3@there-2")
    other.publish(said)
    TurnProcess(settings, "d3@here-1").load()
    load, error = published("load", "error")
    assert load == ("failed" if refused else "loaded")
    if refused:
        assert "worker d3@there-2 serves another from the queue 'd3serve'" in error.replace(
            settings.namespace, "d3serve"
        )
        assert "give fake a D3SERVE_NAMESPACE of its own" in error
    other.retire()
    other.close()


def test_a_worker_that_has_left_forbids_nothing(settings, published):
    other = TurnStore.open(settings, "d3@there-2")
    other.publish({"serves": "another", "load": "loaded"})
    other.retire()
    other.close()
    TurnProcess(settings, "d3@here-1").load()
    assert published("load") == ["loaded"]


class Asker:
    """Submits jobs and sends their wake-ups, as the API does."""

    def __init__(self, settings):
        self._settings, self._wake = settings, Waker(settings)

    def ask(self, state):
        return asyncio.run(self._ask(state))

    async def _ask(self, state):
        async with JobStore.open(self._settings) as jobs:
            request = DecisionRequest(model="fake", state=state, questions={"q": NoulQuestion(type="noul")})
            submitted = await jobs.submit(request, tenant="me")
        if submitted.wake:
            self._wake(submitted.lane)
        return submitted.job_id

    def status(self, job_id):
        async def get():
            async with JobStore.open(self._settings) as jobs:
                return (await jobs.get(job_id, "me")).status

        return asyncio.run(get())

    def wakes(self):
        with open_sync(self._settings) as client:
            return client.llen(Keys(self._settings.namespace)("mq", "interactive"))


@pytest.fixture
def child(settings):
    """A child with its model; it stays until `stop` is called."""
    child = TurnProcess(settings, "d3@here-1")
    child.load()
    child.stop = lambda: child._runner.grace._stop(0, None)
    return child


def while_it_waits(child, *steps):
    """Do one of these before each of the child's waits, then stop it."""
    wait, left = child._store.wait_for_call, list(steps)

    def wait_for_call(seconds):
        if not left:
            child.stop()
            return None
        left.pop(0)()
        return wait(seconds)

    child._store.wait_for_call = wait_for_call


def test_who_submits_calls_a_child_that_waits_and_sends_no_wake_up(settings, child):
    asker, asked = Asker(settings), []

    def ask():
        child._store._table.run("idle", "d3@here-1", 60_000, "interactive")  # as it is about to say itself
        asked.append(asker.ask(f"state {len(asked)}"))
        assert asker.wakes() == 0

    while_it_waits(child, ask, ask)
    child.run_turns()
    assert [asker.status(job) for job in asked] == ["succeeded", "succeeded"]


def test_a_wake_up_that_was_sent_is_taken_by_the_child_that_waits(settings, child):
    asker, asked = Asker(settings), []

    def ask():
        child._store.wait_no_longer()
        asked.append(asker.ask("state"))
        assert asker.wakes() == 1

    while_it_waits(child, ask)
    child.run_turns()
    assert asker.status(*asked) == "succeeded"
    assert asker.wakes() == 0, "it would start an empty turn"


def test_a_child_that_was_called_as_it_left_has_others_woken(settings, child):
    asker, asked = Asker(settings), []

    def ask_and_stop(_):
        child._store._table.run("idle", "d3@here-1", 60_000, "interactive")
        asked.append(asker.ask("state"))
        child.stop()

    child._store.wait_for_call = ask_and_stop
    child.run_turns()
    assert asker.status(*asked) == "queued"
    assert asker.wakes() == 1


FOREIGN = (b"not json", b"\xff\xfe", b"", b"[" * 100_000, b'{"headers": {"task": "another"}}')


@pytest.mark.parametrize("foreign", FOREIGN, ids=range(len(FOREIGN)))
def test_what_is_no_wake_up_is_dropped_with_a_word(settings, child, capsys, foreign):
    asker = Asker(settings)

    def write():
        with open_sync(settings) as client:
            client.lpush(Keys(settings.namespace)("mq", "interactive"), foreign)

    while_it_waits(child, write)
    child.run_turns()
    assert capsys.readouterr().out.count("wake.unreadable") == 1
    assert asker.wakes() == 0


def test_a_child_that_stops_leaves_wake_ups_to_others(settings, child):
    asker = Asker(settings)
    child._store.wait_for_call = lambda _: pytest.fail("it waits for more")
    job, run = asker.ask("first"), child._runner.run

    def run_and_stop():
        report = run()
        child.stop()
        return report

    child._runner.run = run_and_stop
    child.run_turns()
    assert asker.status(job) == "succeeded"


def test_one_task_waits_for_a_while_only(settings, child, monkeypatch):
    monkeypatch.setattr(process, "STAY_S", 0)
    Asker(settings).ask("first")
    child._store.wait_for_call = lambda _: pytest.fail("it waits for more")
    child.run_turns()


MEMORY = ("memory_bytes", "memory_total_bytes", "cached_bytes", "cache_size_bytes")


def test_the_memory_of_a_gpu_is_told_with_the_model_and_after_each_turn(settings, published, monkeypatch):
    used = iter((60, 70))
    monkeypatch.setattr(FakeEngine, "device_memory", lambda _: (next(used), 100))
    child = TurnProcess(settings, "d3@here-1")
    child.load()
    assert published(*MEMORY) == ["60", "100", None, str(64 * 2**20)]
    Asker(settings).ask("first")
    child._run_turn()
    assert published(*MEMORY) == ["70", "100", str(2**20), str(64 * 2**20)]


def test_without_a_gpu_the_memory_of_the_process_is_told(child, settings, published):
    Asker(settings).ask("first")
    child._run_turn()
    used, total, peak = published("memory_bytes", "memory_total_bytes", "peak_memory_bytes")
    assert 2**20 < int(used) < 1.1 * int(peak), "the kernel counts both a little behind"
    assert total is None


def forget_everything(settings):
    with open_sync(settings) as client:
        client.flushall()


def test_a_worker_that_was_forgotten_tells_everything_again(settings, published):
    child = TurnProcess(settings, "d3@here-1")
    child.load()
    child._publish(TurnReport(jobs=1, work_tokens=100, seconds=1.0))
    fields = ("load", "serves", "model", "child", "tokens_per_s")
    before = published(*fields)
    forget_everything(settings)
    assert child._tell_again()
    assert published(*fields) == before
    assert None not in before


def test_a_worker_that_loads_is_known_again_as_one_that_loads(settings, published, monkeypatch):
    child = TurnProcess(settings, "d3@here-1")

    def forgotten_meanwhile(_):
        forget_everything(settings)
        child._tell_again()
        seen.extend(published("load", "child", "serves"))
        raise InvalidSettings("seen enough")

    seen = []
    monkeypatch.setattr(process, "load_engine", forgotten_meanwhile)
    child.load()
    assert seen == ["loading", str(os.getpid()), None]


def test_a_worker_whose_queue_another_model_has_got_meanwhile_answers_nothing(settings, published):
    child = TurnProcess(settings, "d3@here-1")
    child.load()
    forget_everything(settings)
    other = TurnStore.open(settings, "d3@there-2")
    assert other.serve("another", {"load": "loaded"}) is None
    job = Asker(settings).ask("a question to another model")
    child.run_turns()
    assert Asker(settings).status(job) == "queued"
    load, error = published("load", "error")
    assert (load, "serves another from the queue" in error) == ("failed", True)
    forget_everything(settings)
    child._tell_again()
    assert published("load", "serves") == ["failed", None], "it has given up, and stays so"
    other.close()


def test_a_worker_of_another_model_is_refused_before_it_reads_any_weights(settings, published, monkeypatch):
    other = TurnStore.open(settings, "d3@there-2")
    assert other.serve("another", {"load": "loading"}) is None
    monkeypatch.setattr(process, "load_engine", lambda _: pytest.fail("it loaded"))
    TurnProcess(settings, "d3@here-1").load()
    load, error = published("load", "error")
    assert (load, "serves another from the queue" in error) == ("failed", True)
    other.retire()
    other.close()


def test_a_worker_that_still_loads_holds_the_queue_for_its_model(settings, monkeypatch):
    other = TurnStore.open(settings, "d3@there-2")
    answers = []

    def seen_meanwhile(_):
        answers.extend([other.serve("another", {}), other.serve("fake", {})])
        raise InvalidSettings("seen enough")

    monkeypatch.setattr(process, "load_engine", seen_meanwhile)
    TurnProcess(settings, "d3@here-1").load()
    assert answers == [("d3@here-1", "fake"), None]
    assert other.serve("another", {"load": "loaded"}) is None, "it has failed, and holds nothing any more"
    other.retire()
    other.close()


@pytest.mark.parametrize("kind", ["fake", "folder", "hub"])
def test_the_name_that_a_queue_is_held_for_is_the_one_that_is_served(
    kind, tiny_checkpoint, monkeypatch, tmp_path
):
    monkeypatch.setattr(hub, "_commit", lambda _, wanted: wanted)
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    if kind == "fake":
        settings = Settings(model="fake:?name=a")
        assert served_name(settings) == load_engine(settings).info.name == "a"
    else:
        settings = Settings(model=str(tiny_checkpoint) if kind == "folder" else "some/model")
        assert served_name(settings) == hub.locate(settings.model).name
