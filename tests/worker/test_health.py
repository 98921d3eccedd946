"""The probe tells alive, ready and gone apart, and never blames a worker for Redis."""

import socket

import pytest

from d3serve.settings import Settings
from d3serve.store.turns import TurnStore
from d3serve.worker.health import check


@pytest.fixture
def settings(redis_url):
    return Settings(redis_url=redis_url)


@pytest.mark.parametrize(
    ("told", "alive", "ready"),
    [(None, False, False), ({"load": "loading"}, True, False), ({"load": "loaded"}, True, True)],
)
def test_what_a_worker_has_told(settings, told, alive, ready):
    host = socket.gethostname()
    store = TurnStore.open(settings, "d3@here-1")
    if told is not None:
        store.publish({"host": host, "pid": 1, **told})
    assert check(settings, host, ready=False)[0] == alive
    assert check(settings, host, ready=True)[0] == ready
    assert not check(settings, "another-host", ready=False)[0]
    store.close()


def test_redis_away_is_not_the_workers_fault(tmp_path):
    settings = Settings(redis_url=f"unix://{tmp_path}/nobody.sock")
    assert check(settings, "h", ready=False) == (True, "Redis does not answer: ConnectionError")
    assert not check(settings, "h", ready=True)[0]
