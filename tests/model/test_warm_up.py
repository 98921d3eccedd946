"""Warming up leaves an engine as it was."""

from d3serve.model.engine import DecisionEngine
from d3serve.model.state_cache import CacheStats


def test_warm_up_leaves_no_state_and_no_counts(engine: DecisionEngine, questions):
    fresh = engine.decide([engine.prepare("a state", questions)])
    engine.cache.forget(engine.cached_state_keys()[0])
    engine.warm_up()
    assert engine.cached_state_keys() == []
    assert engine.cache.used_bytes == 0
    assert engine.cache_stats == CacheStats()
    assert engine.decide([engine.prepare("a state", questions)]) == fresh
