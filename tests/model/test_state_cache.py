"""The state cache: complete or absent, pinned while in use, never written by a question, bounded."""

import random

import pytest
import torch

from d3serve.errors import InvalidModelOutput, OutOfDeviceMemory
from d3serve.kernels import reference
from d3serve.model import engine as engine_module
from d3serve.model.backbone import row_bytes, slot_bytes
from d3serve.model.engine import DecisionEngine
from d3serve.model.ranges import RangeAllocator
from d3serve.model.state_cache import StateCache
from d3serve.schemas.questions import NoulQuestion

QUESTIONS = {
    f"q{n}": NoulQuestion(type="noul", instructions=f"Is it {'very ' * n}urgent?") for n in range(16)
}
ONE = {"q": QUESTIONS["q3"]}
LONG = "the customer was charged twice for an order "


def sized(package, *, slots: int, rows: int) -> DecisionEngine:
    """An engine whose pools hold exactly so much."""
    engine = DecisionEngine.load(str(package), device="cpu", state_cache_bytes=2**20)
    g, pools = engine.backbone.geometry, engine.backbone.pools
    sizes = {"row_bytes": row_bytes(g, pools.k.dtype), "slot_bytes": slot_bytes(g, pools.k.dtype)}
    engine.cache = StateCache(rows=rows, slots=slots, **sizes)
    engine.backbone.pools = type(pools).allocate(
        g, rows=rows, slots=slots, device=torch.device("cpu"), dtype=torch.float32
    )
    return engine


def values(decided) -> list[float]:
    return [answer.noul for answer in decided.answers.values()]


def checksum(engine) -> list[float]:
    pools = engine.backbone.pools
    return [
        pools.recurrent.double().sum().item(),
        pools.conv.double().sum().item(),
        pools.conv.abs().max().item(),
    ]


def test_twenty_repeats_over_one_cached_state_are_bit_equal_and_leave_it_alone(engine):
    job = engine.prepare(LONG, {name: QUESTIONS[name] for name in ("q0", "q3", "q9")})
    engine.decide([job])
    before, first = checksum(engine), engine.decide([job])[0].answers
    entry = engine.cache.acquire(job.state_key)
    kept = engine.backbone.pools.k[:, entry.start : entry.start + entry.length].clone()
    engine.cache.release(entry)
    assert all(engine.decide([job])[0].answers == first for _ in range(20))
    assert checksum(engine) == before
    assert torch.equal(kept, engine.backbone.pools.k[:, entry.start : entry.start + entry.length])


@pytest.mark.parametrize("state", ["", "x", LONG])
def test_a_new_state_does_not_depend_on_what_its_place_held(state, engine):
    expected = values(engine.decide([engine.prepare(state, QUESTIONS)])[0])
    engine.cache.forget(engine.cached_state_keys()[0])
    pools = engine.backbone.pools
    for pool in (pools.k, pools.v, pools.recurrent, pools.conv):
        pool.fill_(float("nan"))
    assert values(engine.decide([engine.prepare(state, QUESTIONS)])[0]) == expected


def test_more_states_than_slots_take_several_passes(tiny_checkpoint, engine):
    small = sized(tiny_checkpoint, slots=2, rows=2_000)
    states = [f"{LONG} {n}" for n in range(7)]
    found = small.decide([small.prepare(state, ONE) for state in states])
    expected = engine.decide([engine.prepare(state, ONE) for state in states])
    for ours, theirs in zip(found, expected, strict=True):
        assert values(ours) == pytest.approx(values(theirs), abs=1e-5)
        assert not ours.usage.state_cached
    assert len(small.cached_state_keys()) == 2
    assert small.cache_stats.evictions == 5


def test_two_states_that_do_not_fit_together_alternate(tiny_checkpoint, engine):
    jobs = [engine.prepare(LONG * 8 + name, QUESTIONS) for name in "ab"]
    questions = max(sum(map(len, job.blocks)) for job in jobs)
    small = sized(tiny_checkpoint, slots=4, rows=int(1.5 * jobs[0].state_tokens) + questions)
    expected = [values(each) for each in engine.decide(jobs)]
    for _ in range(3):
        for job, wanted in zip(jobs, expected, strict=True):
            assert values(small.decide([job])[0]) == pytest.approx(wanted, abs=1e-5)
    together = small.decide(jobs)
    assert [values(each) for each in together] == [pytest.approx(each, abs=1e-5) for each in expected]


def test_questions_that_do_not_fit_one_pass_take_several_over_one_reading(tiny_checkpoint, engine):
    job = engine.prepare(LONG, QUESTIONS)
    small = sized(tiny_checkpoint, slots=1, rows=job.state_tokens + 3 * max(map(len, job.blocks)))
    (found,) = small.decide([job])
    assert values(found) == pytest.approx(values(engine.decide([job])[0]), abs=1e-5)
    assert found.usage.computed_tokens == job.state_tokens + sum(map(len, job.blocks))
    assert not found.usage.state_cached


def test_a_state_that_a_shorter_one_pushed_off_the_lowest_rows_is_placed_again(tiny_checkpoint, engine):
    """Both gaps beside it are then too short for its question, though all free rows together are not."""
    short, long = (engine.prepare(state, {"q": QUESTIONS["q15"]}) for state in ("x", LONG * 8))
    assert short.state_tokens < len(long.blocks[0])
    small = sized(tiny_checkpoint, slots=2, rows=long.state_tokens + len(long.blocks[0]))
    for job in (short, long, short, long, long):
        assert values(small.decide([job])[0]) == pytest.approx(values(engine.decide([job])[0]), abs=1e-5)


def test_what_does_not_fit_even_alone_is_refused_with_the_sizes(tiny_checkpoint):
    small = sized(tiny_checkpoint, slots=1, rows=200)
    job = small.prepare(LONG * 9, ONE)
    with pytest.raises(OutOfDeviceMemory) as refused:
        small.decide([job])
    assert refused.value.details == {
        "state_tokens": job.state_tokens,
        "question_tokens": len(job.blocks[0]),
        "cache_rows": 200,
        "pass_rows": small.pass_rows,
    }
    fits = small.prepare("x", ONE)
    assert small.decide([fits])[0].usage.questions == 1, "a refusal leaves the pools usable"


def test_a_failed_pass_leaves_no_state_behind(engine, monkeypatch):
    job = engine.prepare(LONG, ONE)
    rule = reference.gated_delta_rule
    monkeypatch.setattr(reference, "gated_delta_rule", lambda *a, **k: rule(*a, **k) * float("nan"))
    assert isinstance(engine.decide([job])[0].failed["q"], InvalidModelOutput)
    assert engine.cached_state_keys() == []
    monkeypatch.undo()
    (decided,) = engine.decide([job])
    assert not decided.usage.state_cached
    assert engine.cached_state_keys() == [job.state_key]
    assert 0 < engine.cached_bytes < engine.cache_size_bytes <= 256 * 2**20
    assert engine.device_memory() is None


def test_a_cached_state_that_gives_no_probabilities_is_forgotten(engine):
    job = engine.prepare(LONG, ONE)
    engine.decide([job])
    engine.backbone.pools.recurrent.fill_(float("nan"))
    assert isinstance(engine.decide([job])[0].failed["q"], InvalidModelOutput)
    assert engine.decide([job])[0].usage.state_cached is False


def test_salts_and_states_have_keys_of_their_own(engine):
    keys = {
        engine.prepare(state, ONE, salt=salt).state_key for state in ("a", "b") for salt in ("", "x", "y")
    }
    assert len(keys) == 6
    assert engine.prepare("a", ONE).state_key == engine.prepare("a", QUESTIONS).state_key


def test_checkpoints_have_keys_of_their_own(engines):
    """The tokens are the same, and what was read of them is not: here only the attention differs."""
    assert len({engines(mode).prepare("a", ONE).state_key for mode in ("prefix_bidir", "causal")}) == 2


def test_a_thousand_short_states_then_long_ones_stay_within_the_budget():
    cache = StateCache(rows=10_000, slots=32, row_bytes=10, slot_bytes=1_000)
    for n in range(1_000):
        entry = cache.reserve(f"short {n}", 100)
        cache.publish(entry)
        cache.release(entry)
    assert len(cache.keys()) == 32
    assert cache.used_bytes <= 10_000 * 10 + 32 * 1_000
    for n in range(3):
        entry = cache.reserve(f"long {n}", 9_000)
        cache.publish(entry)
        cache.release(entry)
        assert cache.keys()[-1] == f"long {n}"
    assert cache.used_bytes <= 10_000 * 10 + 32 * 1_000


def test_a_thousand_short_states_push_out_no_long_one():
    cache = StateCache(rows=400_000, slots=32, row_bytes=10, slot_bytes=1_000)
    names = [f"long {n}" for n in range(3)] + [f"short {n}" for n in range(1_000)]
    for name in names:
        entry = cache.reserve(name, 117_000 if "long" in name else 100)
        cache.publish(entry)
        cache.release(entry)
    assert cache.keys() == names[:3] + names[-29:]


def test_a_long_state_that_nobody_asks_for_makes_room_in_the_end():
    cache = StateCache(rows=10_000, slots=3, row_bytes=10, slot_bytes=1_000)
    for name in ("old", *(f"short {n % 3}" for n in range(60))):
        if (entry := cache.acquire(name)) is None:
            entry = cache.reserve(name, 1_000 if name == "old" else 100)
            cache.publish(entry)
        cache.release(entry)
    assert cache.keys() == ["short 0", "short 1", "short 2"]
    assert cache.stats.hits > 30, "once it is gone, all three are found"


def test_pinned_states_are_never_evicted():
    cache = StateCache(rows=100, slots=2, row_bytes=1, slot_bytes=1)
    pinned = cache.reserve("a", 60)
    assert cache.acquire("a") is None, "not findable before it is complete"
    cache.publish(pinned)
    assert cache.reserve("b", 60) is None
    assert cache.reserve_scratch(50) is None
    assert cache.keys() == ["a"]
    cache.release(pinned)
    other = cache.reserve("b", 60)
    assert other is not None
    assert cache.keys() == []


def test_a_forgotten_state_keeps_its_rows_until_its_last_pin_is_gone():
    cache = StateCache(rows=100, slots=2, row_bytes=1, slot_bytes=1)
    entry = cache.reserve("a", 60)
    cache.publish(entry)
    assert cache.acquire("a") is entry
    cache.forget("a")
    cache.release(entry)
    assert cache.reserve("b", 60) is None
    cache.release(entry)
    assert cache.reserve("b", 60) is not None


def test_scratch_rows_leave_the_low_end_to_states():
    cache = StateCache(rows=100, slots=2, row_bytes=1, slot_bytes=1)
    scratch = cache.reserve_scratch(30)
    entry = cache.reserve("a", 20)
    assert (scratch, entry.start) == (70, 0)
    cache.publish(entry)
    cache.release_scratch(scratch, 30)
    assert cache.reserve("b", 80).start == 20, "next to the other, which need not go"
    assert cache.keys() == ["a"]


def test_the_least_recently_used_goes_first():
    cache = StateCache(rows=90, slots=3, row_bytes=1, slot_bytes=1)
    for key in "abc":
        entry = cache.reserve(key, 30)
        cache.publish(entry)
        cache.release(entry)
    cache.release(cache.acquire("a"))
    cache.release(cache.reserve("d", 30))
    assert cache.keys() == ["c", "a"]


def test_ranges_never_overlap_and_all_come_back():
    draw = random.Random(3)  # noqa: S311  (sizes, not secrets)
    ranges, held = RangeAllocator(500), []
    for _ in range(3_000):
        if held and draw.random() < 0.5:
            ranges.free(*held.pop(draw.randrange(len(held))))
            continue
        length = draw.randint(1, 120)
        start = ranges.allocate(length, high=draw.random() < 0.3)
        if start is not None:
            assert 0 <= start <= 500 - length
            assert all(start + length <= s or s + n <= start for s, n in held)
            held.append((start, length))
    for each in held:
        ranges.free(*each)
    assert list(ranges.gaps()) == [(0, 500)]


@pytest.mark.parametrize("layers", [("linear", "linear"), ("full", "full")])
def test_layers_of_one_kind_need_only_their_own_pool(layers, tmp_path, checkpoint_tool, oracle_of, compare):
    package = checkpoint_tool.write_checkpoint(tmp_path, checkpoint_tool.Variant(layers=layers))
    engine = DecisionEngine.load(str(package), device="cpu", state_cache_bytes=8 * 2**20)
    (decided,) = engine.decide([engine.prepare(LONG, ONE)])
    assert compare(decided.answers["q"], oracle_of(package).probabilities(LONG, ONE["q"])) < 1e-4


@pytest.mark.parametrize("mode", ["prefix_bidir", "noncausal_full_attention"])
def test_a_turn_larger_than_one_pass_may_be_takes_several(mode, packages, monkeypatch):
    engine = DecisionEngine.load(str(packages(mode)), device="cpu")
    jobs = [engine.prepare(f"{LONG} {n}", QUESTIONS) for n in range(3)]
    expected = [values(each) for each in engine.decide(jobs)]
    for key in engine.cached_state_keys():
        engine.cache.forget(key)
    planned, rows = engine_module.plan_rows, []

    def counted(*args):
        found = planned(*args)
        rows.append((len(found.tokens), len(found.readout_rows)))
        return found

    monkeypatch.setattr(engine_module, "plan_rows", counted)
    engine.pass_rows = 600
    again = engine.decide(jobs)
    assert [values(each) for each in again] == [pytest.approx(each, abs=1e-5) for each in expected]
    assert len(rows) > 2
    assert all(count <= 600 for count, _ in rows)
    assert sum(count for count, _ in rows) == sum(each.usage.computed_tokens for each in again)


def test_a_prompt_longer_than_a_pass_may_be_is_refused_before_it_starts(engine, monkeypatch):
    job = engine.prepare(LONG, ONE)
    engine.pass_rows = job.input_tokens - 1
    monkeypatch.setattr(engine.backbone, "forward", None)  # nothing may reach the device
    with pytest.raises(OutOfDeviceMemory, match=f"passes of {engine.pass_rows} rows"):
        engine.decide([job])
