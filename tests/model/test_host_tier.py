"""States that leave the device and come back: the same answers, bit for bit, whatever lay in their place meanwhile."""

import pytest
import torch

from d3serve.errors import InvalidSettings
from d3serve.model.engine import DecisionEngine
from d3serve.model.host_tier import HostTier
from d3serve.model.state_cache import StateCache
from d3serve.schemas.questions import NoulQuestion

QUESTIONS = {"q": NoulQuestion(type="noul", instructions="Is it about a refund?")}
STATES = tuple(f"Ticket {n}: I was charged twice and want a refund. " * (3 + n) for n in range(3))


def engine_of_two_states(package, tier_bytes: int) -> DecisionEngine:
    """Its pools hold two of the states; what is evicted goes to a tier of `tier_bytes`."""
    engine = DecisionEngine.load(str(package), device="cpu")
    sizes = {"row_bytes": engine.cache._row_bytes, "slot_bytes": engine.cache._slot_bytes}
    tier = HostTier(engine.backbone.pools, tier_bytes)
    engine.cache = StateCache(rows=engine.cache.rows, slots=2, tier=tier, **sizes)
    return engine


def answer(engine: DecisionEngine, state: str):
    (decided,) = engine.decide([engine.prepare(state, QUESTIONS)])
    return decided.answers["q"].noul, decided.usage.state_cached


def poison_free_memory(engine: DecisionEngine) -> None:
    """Nothing that is not in a live entry may matter."""
    pools, used = engine.backbone.pools, list(engine.cache._entries.values())
    rows = torch.ones(engine.cache.rows, dtype=torch.bool)
    slots = torch.ones(pools.recurrent.shape[1], dtype=torch.bool)
    for entry in used:
        rows[entry.start : entry.start + entry.length] = False
        slots[entry.slot] = False
    for pool, free in ((pools.k, rows), (pools.v, rows), (pools.recurrent, slots), (pools.conv, slots)):
        pool[:, free] = float("nan")


def test_an_evicted_state_comes_back_whole(tiny_checkpoint) -> None:
    engine = engine_of_two_states(tiny_checkpoint, 2**24)
    answer(engine, STATES[0])
    warm = answer(engine, STATES[0])
    for state in STATES[1:]:
        answer(engine, state)
    assert engine.cache.stats.evictions == 1
    poison_free_memory(engine)
    assert answer(engine, STATES[0]) == warm, "equal to what the device's own cache gave"
    assert engine.cache.stats.restored == 1


@pytest.mark.parametrize("pool", ["k", "v", "recurrent", "conv"])
def test_every_part_of_a_state_travels(tiny_checkpoint, monkeypatch, pool) -> None:
    """Leave one part behind and the answer is not the same."""
    engine = engine_of_two_states(tiny_checkpoint, 2**24)
    answer(engine, STATES[0])
    warm = answer(engine, STATES[0])
    for state in STATES[1:]:
        answer(engine, state)
    load = HostTier.load

    def forgetful(tier, kept, entry):
        load(tier, kept, entry)
        place = slice(entry.start, entry.start + entry.length) if pool in "kv" else entry.slot
        getattr(tier._pools, pool)[:, place] = 0

    monkeypatch.setattr(HostTier, "load", forgetful)
    assert answer(engine, STATES[0]) != warm


def test_without_room_the_longest_kept_goes_and_is_read_again(tiny_checkpoint) -> None:
    engine = engine_of_two_states(tiny_checkpoint, 2**24)
    twins = [f"Ticket {n}: I was charged twice." for n in range(4)]  # states of one size
    answer(engine, twins[0])
    (entry,) = engine.cache._entries.values()
    tier = engine.cache._tier
    tier.save(entry)
    engine = engine_of_two_states(tiny_checkpoint, tier._kept[entry.key].size)
    for state in twins:
        answer(engine, state)
    assert len(engine.cache._tier.keys()) == 1, "there is room for one: the first made way for the second"
    assert not answer(engine, twins[0])[1]
    assert engine.cache.stats.restored == 0


def test_a_state_larger_than_the_tier_is_let_go(tiny_checkpoint) -> None:
    engine = engine_of_two_states(tiny_checkpoint, 128)
    for state in STATES:
        answer(engine, state)
    assert engine.cache._tier.keys() == []
    assert not answer(engine, STATES[0])[1]


def test_a_state_larger_than_the_tier_pushes_no_other_out(tiny_checkpoint) -> None:
    engine = engine_of_two_states(tiny_checkpoint, 400_000)
    for state in (*STATES, "charged twice " * 400, "charged " * 300):
        answer(engine, state)
    kept = engine.cache._tier.keys()
    answer(engine, "twice " * 300)  # in the place of the longest one
    assert engine.cache.stats.evictions == 4
    assert engine.cache._tier.keys() == kept != []


def test_memory_that_the_host_does_not_give_is_refused_by_name(tiny_checkpoint) -> None:
    with pytest.raises(
        InvalidSettings, match=f"state_cache_host_bytes is {2**60}, which the host"
    ) as refused:
        DecisionEngine.load(str(tiny_checkpoint), device="cpu", state_cache_host_bytes=2**60)
    assert refused.value.field == "state_cache_host_bytes"


def test_what_is_forgotten_does_not_come_back(tiny_checkpoint) -> None:
    engine = engine_of_two_states(tiny_checkpoint, 2**24)
    for state in STATES:
        answer(engine, state)
    (kept,) = engine.cache._tier.keys()
    assert kept in engine.cached_state_keys()
    engine.cache.forget(kept)
    assert not answer(engine, STATES[0])[1]
    assert engine.cache.stats.restored == 0
