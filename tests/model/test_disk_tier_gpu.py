"""States in files on a GPU: through pinned memory, beside passes and beside captures of graphs, with the same bits."""

import time

import pytest
import torch

from d3serve.model import disk_tier, state_files
from d3serve.model.engine import DecisionEngine
from d3serve.schemas.questions import NoulQuestion

pytestmark = pytest.mark.gpu

STATE = "I was charged twice and want a refund. " * 300


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")


@pytest.fixture
def started(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_tier, "LEAST_TOKENS", 64)
    monkeypatch.setattr(state_files, "CHUNK_BYTES", 5_000)

    def start():
        options = {"state_cache_bytes": 2**28, "state_cache_dir": tmp_path}
        return DecisionEngine.load(str(tiny_checkpoint), device="cuda", dtype="bfloat16", **options)

    return start


def answers(engine, state, questions=1):
    asked = {
        f"q{n}": NoulQuestion(type="noul", instructions=f"Is it {'very ' * n}urgent?")
        for n in range(questions)
    }
    (decided,) = engine.decide([engine.prepare(state, asked)])
    return [answer.noul for answer in decided.answers.values()]


def written(engine):
    deadline = time.monotonic() + 60
    while engine.cache.is_writing:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_state_comes_back_bit_for_bit_after_a_restart(started):
    first = started()
    cold = answers(first, STATE, 4)
    assert answers(first, STATE, 4) == cold
    written(first)
    second = started()
    for pool in (second.backbone.pools.k, second.backbone.pools.v, second.backbone.pools.recurrent):
        pool.fill_(float("nan"))
    assert answers(second, STATE, 4) == cold
    assert second.cache.stats.restored == 1


def test_graphs_are_captured_while_a_state_is_written(started, monkeypatch):
    """The thread waits for its copies meanwhile, which must not break a capture."""
    engine, write, pause_s = started(), state_files._write_all, [0.1]

    def slowly(*given):
        time.sleep(pause_s[0])
        write(*given)

    monkeypatch.setattr(state_files, "_write_all", slowly)
    cold = answers(engine, STATE)
    assert answers(engine, STATE) == cold
    for questions in (1, 3, 5, 7):  # sizes of a pass that are new: compiled, captured, replayed
        short = [answers(engine, f"a parcel {questions}", questions) for _ in range(3)]
        assert short[0] == short[1] == short[2]
    assert engine.cache.is_writing, "else nothing was copied beside a capture: write more slowly"
    pause_s[0] = 0.0
    written(engine)
    assert answers(started(), STATE) == cold
