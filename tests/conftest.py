"""Fixtures that several rooms' tests share."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import redis
import structlog

from d3serve.up.broker import EmbeddedBroker

# Without a GPU kernels run in Triton's interpreter. Triton reads this when it is first imported, which
# torch or transformers may do in any test: so here, before them all.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Several processes run tests then. With threads for every core in each of them, threads that wait for one another spin
# while those that they wait for have no core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs in its background deaf to an interrupt, and whatever that starts inherits it: rightly so for
# `d3serve`, but tests here interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """The process is pytest's: a test that sets up logging in it blinds those after it, which then fail instead."""
    yield
    assert not structlog.is_configured(), "this test has set up logging, and has not put it back"


@pytest.fixture(scope="session")
def checkpoint_tool() -> ModuleType:
    """tools/make_tiny_checkpoint.py, for packages of other variants."""
    import make_tiny_checkpoint  # brings torch, which not every test needs

    return make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, checkpoint_tool: ModuleType) -> Path:
    """The bundled tiny checkpoint, in the real package format. Read only: tests that change it copy it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    written: Path = checkpoint_tool.write_checkpoint(folder)
    return written


@pytest.fixture
def anyio_backend() -> str:
    """The event loop that the service runs on."""
    return "asyncio"


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server for tests that only need one; those that break it bring their own."""
    broker = EmbeddedBroker(tmp_path_factory.mktemp("redis"), 2**28).start()
    yield broker.url
    broker.stop()


@pytest.fixture
def raw_redis(redis_url: str) -> Iterator[redis.Redis]:
    """A client of that server, which is emptied first."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        yield client
