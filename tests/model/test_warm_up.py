"""Warming up leaves an engine as it was, and meets every kernel that a client's job may need."""

from types import SimpleNamespace

import pytest
import torch

from d3serve.kernels.attention_tiles import DENSE_ROWS
from d3serve.kernels.prefix_bidir import cut_attention
from d3serve.kernels.segments import AttentionShape, Segment
from d3serve.model.buckets import ROW_SIZES
from d3serve.model.engine import WARM_UP_ROWS, DecisionEngine, _rehearsal
from d3serve.model.state_cache import CacheStats


def test_warm_up_leaves_no_state_and_no_counts(engine: DecisionEngine, questions):
    fresh = engine.decide([engine.prepare("a state", questions)])
    engine.cache.forget(engine.cached_state_keys()[0])
    engine.warm_up()
    assert engine.cached_state_keys() == []
    assert engine.cache.used_bytes == 0
    assert engine.cache_stats == CacheStats()
    assert engine.decide([engine.prepare("a state", questions)]) == fresh


def test_an_engine_of_short_passes_rehearses_what_they_hold(engine: DecisionEngine):
    """A cache that the operator made large may leave little for a pass: no reason not to start."""
    engine.pass_rows = 20
    engine.warm_up()


@pytest.mark.parametrize("rows", WARM_UP_ROWS)
def test_rehearsed_questions_have_pieces_to_merge(rows):
    job = _rehearsal(rows, 4)
    state = len(job.state)
    questions = [Segment(0, len(block), state, 0, state) for block in job.blocks[:1]]
    shape = AttentionShape(False, 24, 4, 256, torch.bfloat16, torch.device("cpu"))
    assert cut_attention(questions, shape).partials > 0


def test_a_rehearsed_state_takes_the_dense_attention():
    assert len(_rehearsal(max(WARM_UP_ROWS), 4).state) in DENSE_ROWS


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "fla"])
def test_on_a_gpu_what_tunes_itself_meets_the_longest_pass_first(engine: DecisionEngine, graphs, monkeypatch):
    """fla keeps what was fastest for the first pass that it meets, and small passes replay no graph with it."""
    rehearsed = []
    pools = SimpleNamespace(k=SimpleNamespace(is_cuda=True))
    monkeypatch.setattr(engine, "backbone", SimpleNamespace(pools=pools, tower=None))
    monkeypatch.setattr(engine, "_graphs", object() if graphs else None)
    monkeypatch.setattr(
        engine, "_rehearse", lambda rows, *_, read_state: rehearsed.append((rows, read_state))
    )
    engine.warm_up()
    sizes = [rows for rows, _ in rehearsed]
    assert sizes[0] == (ROW_SIZES[0] if graphs else WARM_UP_ROWS[-1])
    assert sizes[-2:] == list(WARM_UP_ROWS)
    assert set(sizes) - set(WARM_UP_ROWS) == set(ROW_SIZES if graphs else ROW_SIZES[:1])
    assert (ROW_SIZES[0], False) in rehearsed
