"""Whatever goes wrong between loading a model and serving it, the main process hears of it."""

import os

import pytest

from d3serve.errors import InvalidSettings
from d3serve.settings import Settings
from d3serve.store.connect import open_sync
from d3serve.store.turns import TurnStore
from d3serve.worker import process
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
    child.run_turn()  # and has nothing to run


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
    child._runner.run = lambda: pytest.fail("it ran a turn")
    child.run_turn()
    load, error = published("load", "error")
    assert (load, "serves another from the queue" in error) == ("failed", True)
    forget_everything(settings)
    child._tell_again()
    assert published("load", "serves") == ["failed", None], "it has given up, and stays so"
    other.close()
